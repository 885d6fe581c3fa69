"""The tokenizer of a data set: where it comes from, what it puts around a text, what is kept."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.hashing import text_hash
from elastrata_pipelines.preparation.packing import Frame
from elastrata_pipelines.preparation.pairs import PairFrame
from elastrata_pipelines.storage import Storage

_SPACE_MARKERS = {"ByteLevel": "Ġ", "Metaspace": "▁"}
_BREAKS = "ĠĊĉč"  # how byte-level tokenizers write space, line feed, tab, carriage return
_ROLES = (
    "pad_token",
    "unk_token",
    "bos_token",
    "eos_token",
    "cls_token",
    "sep_token",
    "mask_token",
)
_VOLATILE = ("name_or_path", "is_local", "local_files_only", "_commit_hash", "tokenizer_file")


@dataclass(frozen=True)
class TokenizerFiles:
    """A fast tokenizer as the two files that transformers' AutoTokenizer loads it from."""

    tokenizer_json: str
    config_json: str

    @cached_property
    def _parsed(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.tokenizer_json)

    @cached_property
    def _description(self) -> dict[str, Any]:
        description: dict[str, Any] = json.loads(self.tokenizer_json)
        return description

    @property
    def fingerprint(self) -> str:
        """A hash of what turns text into ids."""
        return f"{text_hash(self.tokenizer_json):016x}"

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id."""
        return 1 + int(max(self.ids.values()))

    @property
    def ids(self) -> dict[str, int]:
        """The id of every token, the added ones included."""
        found: dict[str, int] = self._parsed.get_vocab(with_added_tokens=True)
        return found

    def token_id(self, role: str) -> int | None:
        """The id of a special token by its role, such as `pad_token`; None where it has none."""
        token = json.loads(self.config_json).get(role)
        content = token.get("content") if isinstance(token, Mapping) else token
        found = None if content is None else self._parsed.token_to_id(content)
        return None if found is None else int(found)

    @property
    def unknown_id(self) -> int | None:
        """The id of what the tokenizer does not know; None where it knows all text."""
        found = self.token_id("unk_token")
        others = {self.token_id(role) for role in _ROLES if role != "unk_token"}
        return None if found in others else found

    def frame(self) -> Frame:
        """The ids around a text, by the tokenizer's own post-processor.

        Where it puts nothing after a text, documents end with the end-of-sequence token, if any.
        """
        bare, framed = self._ids("a"), self._ids("a", special=True)
        at = _find(framed, bare)
        prefix, suffix = tuple(framed[:at]), tuple(framed[at + len(bare) :])
        eos = self.token_id("eos_token")
        return Frame(prefix, suffix, () if suffix or eos is None else (eos,))

    def pair_frame(self) -> PairFrame:
        """The ids around a pair of texts.

        Raises:
            UserError: the tokenizer puts nothing between two texts.
        """
        first, second = self._ids("a"), self._ids("b")
        framed = self._ids("a", "b", special=True)
        at = _find(framed, first)
        begin = at + len(first)
        middle = _find(framed[begin:], second)
        if not middle:
            raise UserError("pairs: the tokenizer puts no token between two texts, as BERT's does")
        frame = tuple(framed[:at]), tuple(framed[begin : begin + middle])
        return PairFrame(*frame, tuple(framed[begin + middle + len(second) :]))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return self._ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out."""
        text: str = self._parsed.decode(list(ids), skip_special_tokens=True)
        return text

    def _ids(self, *texts: str, special: bool = False) -> list[int]:
        ids: list[int] = self._parsed.encode(*texts, add_special_tokens=special).ids
        return ids

    def vocabulary(self) -> Vocabulary:
        """The vocabulary: all that training must know of the tokenizer."""
        special = {int(i) for i, t in self._parsed.get_added_tokens_decoder().items() if t.special}
        roles = {role: self.token_id(role) for role in _ROLES}
        special |= {token for token in roles.values() if token is not None}
        pad = roles["pad_token"] if roles["pad_token"] is not None else roles["eos_token"]
        return Vocabulary(
            size=self.vocabulary_size,
            pad_id=0 if pad is None else pad,
            mask_id=roles["mask_token"],
            special_ids=tuple(sorted(special)),
            continuation_ids=self._continuation_ids(special),
        )

    def _continuation_ids(self, special: set[int]) -> tuple[int, ...]:
        model = self._description["model"]
        words = [
            (int(token_id), token)
            for token, token_id in self._parsed.get_vocab(with_added_tokens=False).items()
            if token_id not in special
        ]
        if model["type"] == "WordPiece":
            prefix = model.get("continuing_subword_prefix") or "##"
            return tuple(sorted(i for i, token in words if token.startswith(prefix)))
        marker = _space_marker(self._description)
        if marker is None:
            return ()
        return tuple(sorted(i for i, token in words if _continues(token, marker)))

    @property
    def contents(self) -> dict[str, str]:
        """The text of both files by their names."""
        return {"tokenizer.json": self.tokenizer_json, "tokenizer_config.json": self.config_json}


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where `part` begins in `ids`."""
    return next(i for i in range(len(ids) + 1) if list(ids[i : i + len(part)]) == list(part))


def _space_marker(description: dict[str, Any]) -> str | None:
    """The character that stands for the space before a word, where the tokenizer has one."""
    for stage in ("pre_tokenizer", "decoder"):
        part = description.get(stage) or {}
        for inner in (part, *part.get("pretokenizers", []), *part.get("decoders", [])):
            if inner.get("type") in _SPACE_MARKERS:
                return _SPACE_MARKERS[inner["type"]]
    return None


def _continues(token: str, marker: str) -> bool:
    """Whether a token goes on with a word: no space before it, and not punctuation."""
    first = token[:1]
    return not (first == marker or first in _BREAKS or (first.isascii() and not first.isalnum()))


def load_tokenizer(name: str) -> TokenizerFiles:
    """Loads a fast tokenizer from a folder, a tokenizer.json file, a URL of either, or the hub.

    Raises:
        UserError: there is none, or it is not a fast one.
    """
    with tempfile.TemporaryDirectory(prefix="elastrata-") as scratch:
        path = _local_copy(name, scratch)
        try:
            tokenizer = _load_with_transformers(path)
        except Exception as error:  # transformers raises whatever its parsers raise
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"tokenizer.load: {name}: cannot be loaded ({reason})") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"tokenizer.load: {name}: has no tokenizer.json; only fast tokenizers work")
    return as_files(tokenizer)


def _local_copy(name: str, scratch: str) -> str:
    if "://" not in name:
        return name
    storage = Storage(name)
    if name.endswith(".json"):
        target = Path(scratch) / "tokenizer.json"
        target.write_bytes(storage.read())
        return str(target)
    for file in storage.names():
        (Path(scratch) / file).write_bytes(storage.read(file))
    return scratch


def _load_with_transformers(path: str) -> Any:
    if path.endswith(".json") and Path(path).is_file():
        return wrap(tokenizer_file=path)
    folder = Path(path)
    only_json = (folder / "tokenizer.json").is_file() and not (
        folder / "tokenizer_config.json"
    ).is_file()
    if only_json:
        return wrap(tokenizer_file=str(folder / "tokenizer.json"))
    from transformers import AutoTokenizer  # takes seconds

    return AutoTokenizer.from_pretrained(path)


def wrap(**arguments: object) -> Any:
    """A transformers tokenizer around a tokenizer of `tokenizers`, or around its file."""
    from transformers import PreTrainedTokenizerFast

    make: Callable[..., Any] = PreTrainedTokenizerFast
    return make(**arguments)


def as_files(tokenizer: Any, **config: object) -> TokenizerFiles:
    """The files of a transformers tokenizer, without truncation, padding and traces of its origin.

    Args:
        tokenizer: a fast tokenizer of transformers.
        config: entries of tokenizer_config.json to set.
    """
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    with tempfile.TemporaryDirectory(prefix="elastrata-") as scratch:
        tokenizer.save_pretrained(scratch)
        saved = json.loads((Path(scratch) / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer_json = (Path(scratch) / "tokenizer.json").read_text(encoding="utf-8")
    kept = {name: value for name, value in saved.items() if name not in _VOLATILE}
    return TokenizerFiles(tokenizer_json, json.dumps({**kept, **config}, indent=1, sort_keys=True))
