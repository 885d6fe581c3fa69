"""Tokenizers: loads the tokenizer of a data set, finds its special tokens, and saves it."""

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
from elastrata_pipelines.waits import reach_hub, waiting_for

_SPACE_MARKERS = {"ByteLevel": "Ġ", "Metaspace": "▁"}
# Byte-level tokenizers write space, line feed, tab and carriage return as these letters.
_BREAKS = "ĠĊĉč"
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
# Every setting of tokenizers' models, and of SentencePiece, that makes ids random.
_RANDOM_OF_MODEL = ("dropout", "alpha", "nbest_size")
_RANDOM_OF_SENTENCEPIECE = ("enable_sampling", "alpha", "nbest_size")
# No vocabulary is as large as these ids.
_MARKERS = (2**32 - 1, 2**32 - 2)
"""Ids that stand for the first and the second text when a tokenizer frames them."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A fast tokenizer as the two files from which transformers' AutoTokenizer loads it."""

    tokenizer_json: str
    config_json: str
    switched_off: tuple[str, ...] = ()
    """Settings that made ids random and were removed from the files, such as `dropout 0.1`."""

    @cached_property
    def _parsed(self) -> Any:
        return parse_tokenizer(self.tokenizer_json)

    @cached_property
    def _description(self) -> dict[str, Any]:
        description: dict[str, Any] = json.loads(self.tokenizer_json)
        return description

    @property
    def fingerprint(self) -> str:
        """Hash of everything that affects the ids of a text."""
        return f"{text_hash(self.tokenizer_json):016x}"

    @property
    def vocabulary_size(self) -> int:
        """Largest id plus one."""
        return 1 + int(max(self.ids.values()))

    @property
    def ids(self) -> dict[str, int]:
        """Id of every token, including added ones."""
        found: dict[str, int] = self._parsed.get_vocab(with_added_tokens=True)
        return found

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token by its role, such as `pad_token`; None if it does not
        exist."""
        token = json.loads(self.config_json).get(role)
        content = token.get("content") if isinstance(token, Mapping) else token
        found = None if content is None else self._parsed.token_to_id(content)
        return None if found is None else int(found)

    @property
    def unknown_id(self) -> int | None:
        """Id of the unknown token; None if the tokenizer can encode all text."""
        found = self.token_id("unk_token")
        if found is None and (unknown := self._description["model"].get("unk_token")):
            # A tokenizer.json without a configuration file does not name roles.
            found = self._parsed.token_to_id(unknown)
        others = {self.token_id(role) for role in _ROLES if role != "unk_token"}
        # GPT-2's configuration gives the end-of-text token also as the unknown one.
        return None if found in others else found

    def frame(self) -> Frame:
        """Return the ids around a text, according to the tokenizer's post-processor.

        If the post-processor adds nothing after a text, documents end with the end-of-sequence
        token, if there is one.

        Raises:
            UserError: the post-processor does not keep a text exactly once.
        """
        framed, _ = self._frame_markers(1)
        at = framed.index(_MARKERS[0])
        prefix, suffix = tuple(framed[:at]), tuple(framed[at + 1 :])
        eos = self.token_id("eos_token")
        return Frame(prefix, suffix, () if suffix or eos is None else (eos,))

    def pair_frame(self) -> PairFrame:
        """Return the ids around a pair of texts, according to the tokenizer's post-processor.

        Raises:
            UserError: the tokenizer adds no token between two texts, or does not keep both.
        """
        framed, types = self._frame_markers(2)
        first, second = map(framed.index, _MARKERS)
        if second == first + 1:
            raise UserError("pairs: the tokenizer puts no token between two texts, as BERT's does")
        return PairFrame(
            prefix=tuple(framed[:first]),
            middle=tuple(framed[first + 1 : second]),
            suffix=tuple(framed[second + 1 :]),
            has_segments=types == [0] * second + [1] * (len(types) - second),
        )

    def _frame_markers(self, texts: int) -> tuple[list[int], list[int]]:
        """Return the ids and types that the post-processor makes of one marker per text."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        markers = _MARKERS[:texts]
        words = {str(marker): marker for marker in markers}
        # Markers instead of an example text: an alphabet may lack any letter of an example.
        marked = Tokenizer(WordLevel(words, unk_token=str(markers[0])))
        try:
            framed = self._parsed.post_process(*map(marked.encode, words))
        except BaseException as error:
            raise make_user_error(error, "frames no text") from None
        if [token for token in framed.ids if token in markers] != list(markers):
            what = "the text once" if texts == 1 else "the first text once, then the second once"
            raise UserError(f"tokenizer: its template gives {framed.tokens}: expected {what} in it")
        foreign = {*framed.ids} - {*markers} - {*self.ids.values()}
        if foreign:
            raise UserError(
                f"tokenizer: its template adds id {min(foreign)}, which no token of its has"
            )
        return list(framed.ids), list(framed.type_ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        try:
            ids: list[int] = self._parsed.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            raise make_user_error(error, "gives no ids for a text") from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._parsed.decode(list(ids), skip_special_tokens=True)
        return text

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary: everything that training needs to know of the tokenizer."""
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
        return tuple(sorted(i for i, token in words if _is_continuation(token, marker)))

    @property
    def contents(self) -> dict[str, str]:
        """Texts of both files, by name."""
        return {"tokenizer.json": self.tokenizer_json, "tokenizer_config.json": self.config_json}


def parse_tokenizer(tokenizer_json: str) -> Any:
    """Return a tokenizer without truncation, padding and randomness."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    switch_off_randomness(tokenizer)
    return tokenizer


def switch_off_randomness(tokenizer: Any) -> list[str]:
    """Switch off every setting of a tokenizer that makes ids random, and return these settings."""
    found = []
    for setting in _RANDOM_OF_MODEL:
        if value := getattr(tokenizer.model, setting, None):
            setattr(tokenizer.model, setting, None)
            found.append(f"{setting} {value:g}")
    return found


def make_user_error(error: BaseException, what: str, where: str = "tokenizer") -> UserError:
    """Return a one-line error for an exception of `tokenizers`.

    Raises:
        BaseException: `error`, if it has another origin.
    """
    # Panics of Rust code are no subclass of Exception.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return UserError(f"{where}: {what} ({' '.join(str(error).split())[:300]})")


def _space_marker(description: dict[str, Any]) -> str | None:
    """Return the character that stands for the space before a word, if the tokenizer has one."""
    for stage in ("pre_tokenizer", "decoder"):
        part = description.get(stage) or {}
        for inner in (part, *part.get("pretokenizers", []), *part.get("decoders", [])):
            if inner.get("type") in _SPACE_MARKERS:
                return _SPACE_MARKERS[inner["type"]]
    return None


def _is_continuation(token: str, marker: str) -> bool:
    """Return whether a token continues a word: it has no space before it, and is not
    punctuation."""
    first = token[:1]
    return not (first == marker or first in _BREAKS or (first.isascii() and not first.isalnum()))


def load_tokenizer(name: str) -> TokenizerFiles:
    """Load a fast tokenizer from a folder, a tokenizer.json file, a URL of either, or the hub.

    Raises:
        UserError: the tokenizer does not exist, or is not a fast one.
    """
    with tempfile.TemporaryDirectory(prefix="elastrata-") as scratch:
        path = _local_copy(name, scratch)
        try:
            tokenizer = _load_with_transformers(path)
        # transformers passes on whatever its parsers raise, also panics.
        except BaseException as error:
            raise make_user_error(error, f"{name}: cannot be loaded", "tokenizer.load") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"tokenizer.load: {name}: has no tokenizer.json; only fast tokenizers work")
    return to_files(tokenizer)


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
        return wrap_for_transformers(tokenizer_file=path)
    folder = Path(path)
    only_json = (folder / "tokenizer.json").is_file() and not (
        folder / "tokenizer_config.json"
    ).is_file()
    if only_json:
        return wrap_for_transformers(tokenizer_file=str(folder / "tokenizer.json"))
    # The import takes seconds.
    from transformers import AutoTokenizer

    failure = None if folder.exists() else reach_hub(f"/api/models/{path}")
    try:
        with waiting_for(f"the tokenizer {path}"):
            return AutoTokenizer.from_pretrained(path, local_files_only=failure is not None)
    except OSError as error:
        raise failure or error from None


def wrap_for_transformers(**arguments: object) -> Any:
    """Return a transformers tokenizer for a tokenizer of `tokenizers`, or for its file."""
    from transformers import PreTrainedTokenizerFast

    make: Callable[..., Any] = PreTrainedTokenizerFast
    return make(**arguments)


def to_files(tokenizer: Any, **config: object) -> TokenizerFiles:
    """Return the files of a transformers tokenizer without truncation, padding, randomness and
    origin.

    Args:
        tokenizer: a fast tokenizer of transformers.
        config: entries of tokenizer_config.json to set.
    """
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    switched_off = switch_off_randomness(tokenizer.backend_tokenizer)
    with tempfile.TemporaryDirectory(prefix="elastrata-") as scratch:
        tokenizer.save_pretrained(scratch)
        saved = json.loads((Path(scratch) / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer_json = (Path(scratch) / "tokenizer.json").read_text(encoding="utf-8")
    # Paths and commits would make equal tokenizers differ.
    config_values = {name: value for name, value in saved.items() if name not in _VOLATILE}
    sentencepiece = config_values.get("sp_model_kwargs")
    if isinstance(sentencepiece, Mapping) and sentencepiece.get("enable_sampling"):
        rest = {k: v for k, v in sentencepiece.items() if k not in _RANDOM_OF_SENTENCEPIECE}
        config_values["sp_model_kwargs"] = rest
        switched_off.append("enable_sampling")
    config_json = json.dumps({**config_values, **config}, indent=1, sort_keys=True)
    return TokenizerFiles(tokenizer_json, config_json, tuple(switched_off))
