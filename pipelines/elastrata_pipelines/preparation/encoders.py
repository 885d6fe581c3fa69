"""Encoders: turn text into ids, by the fastest method that gives exactly the tokenizer's ids.

No text longer than `MAX_CHARACTERS` is encoded in one piece. Nearly all tokenizers treat words
independently, so a text is divided at a word end. Every such place is first tried on the text
around it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from elastrata_pipelines.preparation.packing import ranges
from elastrata_pipelines.preparation.samples import Ints, Tokens
from elastrata_pipelines.preparation.tokenizer import make_user_error, parse_tokenizer

# A tokenizer needs many times the memory of a text.
MAX_CHARACTERS = 2**20
"""Maximum length of a text that is encoded in one piece."""
_SEARCHED_CHARACTERS = 2**16
_TRIED_CHARACTERS = 256
_TRIED_PLACES = 16

Same = Callable[[str, str, str], bool]
"""Function of a text and its two parts that returns whether the parts' ids are those of the
whole."""

_LETTER = r"[^\W\d_]"
_PLACES = tuple(
    re.compile(pattern)
    for pattern in (
        # Before a space.
        rf"(?<={_LETTER})(?= {_LETTER})",
        # Instead of a space: some tokenizers add one in front of every text.
        rf"(?<={_LETTER})(?: )(?={_LETTER})",
        # After a line feed.
        r"(?<=\S\n)(?=\S)",
        # Before a punctuation mark, for scripts without spaces.
        r"(?<=\w)(?=[^\w\s'\u2019])",
    )
)
"""Patterns of word ends, best first; matched characters are left out."""


def split_text(text: str, same: Same, most: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield a text in parts of at most `most` characters, and whether each ends at an accepted
    place.

    A part without an accepted place near its end is divided when it is full. The last flag is True.

    Args:
        text: the text.
        same: function that accepts or rejects a place.
        most: maximum number of characters in a part; 0 for `MAX_CHARACTERS`.
    """
    begin = 0
    most = most or MAX_CHARACTERS
    while len(text) - begin > most:
        place = _find_place(
            text, begin + most - min(_SEARCHED_CHARACTERS, most), begin + most, same
        )
        end, following = place or (begin + most,) * 2
        yield text[begin:end], place is not None
        begin = following
    yield (text[begin:] if begin else text), True


def _find_place(text: str, first: int, limit: int, same: Same) -> tuple[int, int] | None:
    """Return the last accepted place before `limit`: the end of a part and the start of the next
    one."""
    for pattern in _PLACES:
        found = [match.span() for match in pattern.finditer(text, first, limit)]
        for end, following in reversed(found[-_TRIED_PLACES:]):
            before, after = max(0, end - _TRIED_CHARACTERS), following + _TRIED_CHARACTERS
            if same(text[before:after], text[before:end], text[following:after]):
                return end, following
    return None


_BATCH_CHARACTERS = 2**18
_SAMPLE_TEXTS = 48
_SAMPLE_CHARACTERS = 2**10
_CACHED_WORDS, _CACHED_CHARACTERS = 2**19, 2**25
_MUCH_SPACE = 100_000
_WIDE = re.compile(rf"\s{{{_MUCH_SPACE}}}")

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace("{1,3}", "")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS = {
    # An equivalent form that never backtracks.
    _GPT2: r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    _CL100K: _CL100K,
    _QWEN2: _QWEN2,
}
"""Patterns of Split that have the same meaning in tokenizers and tiktoken, with their form for
tiktoken. Character classes are the same in both, and every character is matched."""
_BPE_SETTINGS = {
    *("type", "vocab", "merges", "dropout", "ignore_merges"),
    *("continuing_subword_prefix", "end_of_word_suffix"),
    # Without effect, since no byte is unknown.
    *("unk_token", "fuse_unk", "byte_fallback"),
}


class Encoder(Protocol):
    """Turns text into ids. Special tokens that are spelled out in a text are treated as ordinary
    text."""

    name: str

    def __call__(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of all texts, without special tokens around them."""
        ...


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Token ids of several texts."""

    tokens: Tokens
    """Tokens of all texts end to end, uint32."""
    lengths: Ints
    """Number of tokens of each text."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, EncodedTexts)
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.tokens, other.tokens)
        )


def _concatenate(lists: Sequence[list[int]]) -> EncodedTexts:
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    flat = itertools.chain.from_iterable(lists)
    return EncodedTexts(np.fromiter(flat, dtype=np.uint32, count=int(lengths.sum())), lengths)


class ExactEncoder:
    """Encoder that uses the tokenizer itself."""

    name = "tokenizers"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of all texts.

        Raises:
            UserError: the tokenizer cannot encode a text, since it lacks an unknown token.
        """
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            raise make_user_error(error, "gives no ids for a text") from None
        return _concatenate([encoding.ids for encoding in encoded])


class TiktokenEncoder:
    """Byte-level BPE encoder that uses tiktoken."""

    name = "tiktoken"

    def __init__(self, pattern: str, tokens_by_rank: list[bytes], ids_by_rank: list[int]) -> None:
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(tokens_by_rank)}
        self._encoding = tiktoken.Encoding(
            "elastrata", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        self._ids = np.array(ids_by_rank, dtype=np.uint32)

    def __call__(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of all texts."""
        ranks = _concatenate([self._encoding.encode_ordinary(text) for text in texts])
        return EncodedTexts(self._ids[ranks.tokens], ranks.lengths)


class _Numbers(dict[str, int]):
    """Dictionary that assigns the next number to every new word."""

    characters = 0

    def __missing__(self, word: str) -> int:
        self.characters += len(word)
        self[word] = number = len(self)
        return number


class WordCacheEncoder:
    """BERT's WordPiece with a cache of words."""

    name = "tokenizers with a word cache"

    # BERT splits at white space and around punctuation first, so the ids of a text are those of its
    # runs without ASCII white space and punctuation, and of its punctuation marks.
    _parts = re.compile(r"[^ \t\r\n!-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")

    def __init__(self, exact: ExactEncoder) -> None:
        self._exact = exact
        self._clear_cache()

    def _clear_cache(self) -> None:
        self._numbers = _Numbers()
        self._words = EncodedTexts(np.empty(0, np.uint32), np.empty(0, np.int64))
        self._starts = np.empty(0, np.int64)

    def __call__(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of all texts."""
        if len(self._numbers) > _CACHED_WORDS or self._numbers.characters > _CACHED_CHARACTERS:
            self._clear_cache()
        numbers = [self._number_words(text) for text in texts]
        self._encode_new_words()
        counts = [int(self._words.lengths[inside].sum()) for inside in numbers]
        words = np.concatenate([np.empty(0, np.int64), *numbers])
        places = ranges(self._starts[words], self._words.lengths[words])
        return EncodedTexts(self._words.tokens[places], np.array(counts, dtype=np.int64))

    def _number_words(self, text: str) -> Ints:
        parts = self._parts.findall(text)
        return np.fromiter(map(self._numbers.__getitem__, parts), dtype=np.int64, count=len(parts))

    def _encode_new_words(self) -> None:
        """Encode the words that were numbered since the last call."""
        new = list(itertools.islice(self._numbers, len(self._words.lengths), None))
        if not new:
            return
        encoded = self._exact(new)
        lengths = np.concatenate([self._words.lengths, encoded.lengths])
        self._words = EncodedTexts(np.concatenate([self._words.tokens, encoded.tokens]), lengths)
        self._starts = np.cumsum(lengths) - lengths


class CheckedEncoder:
    """A fast encoder that is compared with the exact one on a sample of every portion."""

    # A second check only: `make_encoder` chooses encoders that are equal by construction.
    def __init__(self, fast: Encoder | None, exact: Encoder) -> None:
        self._fast = fast
        self._exact = exact

    def encode(self, texts: Sequence[str], dtype: str = "uint32") -> tuple[Tokens, Ints, str]:
        """Return the ids of all texts end to end, the tokens of each text, and the name of the
        encoder."""
        chosen = self._choose(texts)
        owners: list[int] = []
        # Grows in place; concatenating a list of arrays would need twice the memory.
        tokens = bytearray()
        lengths: list[Ints] = [np.empty(0, np.int64)]
        for batch in _batches(self._parts(texts, owners)):
            encoded = (self._exact if any(map(_is_wide, batch)) else chosen)(batch)
            tokens += encoded.tokens.astype(dtype).data.cast("B")
            lengths.append(encoded.lengths)
        of_parts = np.concatenate(lengths)
        of_texts = np.bincount(np.array(owners, dtype=np.int64), of_parts, minlength=len(texts))
        return np.frombuffer(tokens, dtype), of_texts.astype(np.int64), chosen.name

    def _parts(self, texts: Sequence[str], owners: list[int]) -> Iterator[str]:
        """Yield the parts of all texts, and append the number of each part's text to `owners`."""
        for number, text in enumerate(texts):
            for part, _ in split_text(text, self._same):
                owners.append(number)
                yield part

    def _same(self, whole: str, *halves: str) -> bool:
        return np.array_equal(self._exact([whole]).tokens, self._exact(halves).tokens)

    def _choose(self, texts: Sequence[str]) -> Encoder:
        if self._fast is None:
            return self._exact
        step = max(1, len(texts) // _SAMPLE_TEXTS)
        sample = [text[:_SAMPLE_CHARACTERS] for text in texts[::step]]
        return self._fast if self._fast(sample) == self._exact(sample) else self._exact


def _is_wide(text: str) -> bool:
    """Return whether a text has more consecutive white space than tiktoken can match."""
    # The stack of tiktoken's regular expressions is limited: it panics at about a million
    # characters.
    return len(text) > _MUCH_SPACE and _WIDE.search(text) is not None


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield batches of consecutive texts, limited in size."""
    batch: list[str] = []
    filled = 0
    for text in texts:
        batch.append(text)
        filled += len(text)
        # Ids are Python lists at first, which take many times the memory of an array.
        if filled >= _BATCH_CHARACTERS:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=2)
def make_encoder(tokenizer_json: str) -> CheckedEncoder:
    """Return the encoder of a tokenizer, which uses one thread."""
    # Ray fills the cores with processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = parse_tokenizer(tokenizer_json)
    tokenizer.encode_special_tokens = True
    exact = ExactEncoder(tokenizer)
    # Contains every default, as the library reads it. A fast encoder is used only if it follows
    # every setting, so that its ids are equal by construction.
    description = json.loads(tokenizer.to_str())
    if not all(token["special"] for token in description["added_tokens"]):
        return CheckedEncoder(None, exact)
    if _is_bert(description):
        return CheckedEncoder(WordCacheEncoder(exact), exact)
    return CheckedEncoder(_make_tiktoken(tokenizer, description), exact)


def _is_bert(description: dict[str, Any]) -> bool:
    kinds = [
        (description[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")
    ]
    return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def _make_tiktoken(tokenizer: Any, description: dict[str, Any]) -> Encoder | None:
    """Return a tiktoken encoder if the tokenizer is byte-level BPE without other features.

    tiktoken merges any two neighbours that form a token, tokenizers only listed pairs. Both agree
    if every token is formed by exactly one merge, and the listed merges form it from its own bytes:
    two neighbours are then the result of merging their bytes, and only one state of these bytes,
    the one before the token's own merge, leads to the token.
    """
    model = description["model"]
    pattern = _split_pattern(description["pre_tokenizer"])
    frills = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or not _BPE_SETTINGS.issuperset(model) or pattern is None:
        return None
    if description["normalizer"] is not None or any(model.get(frill) for frill in frills):
        return None
    characters = _byte_characters()
    vocab: dict[str, int] = model["vocab"]
    merged = ["".join(merge) for merge in model["merges"]]
    tokens = [*characters, *merged]
    if len(set(tokens)) < len(tokens) or not vocab.keys() >= set(tokens):
        return None
    if not characters.keys() >= set("".join(merged)) or not _makes_own_tokens(
        tokenizer.model, merged, vocab
    ):
        return None
    as_bytes = [bytes(characters[letter] for letter in token) for token in tokens]
    return TiktokenEncoder(pattern, as_bytes, [vocab[token] for token in tokens])


def _makes_own_tokens(model: Any, tokens: list[str], ids: dict[str, int]) -> bool:
    """Return whether a model turns the text of each of these tokens into that token."""
    from tokenizers import Tokenizer

    encoded = Tokenizer(model).encode_batch_fast(tokens, add_special_tokens=False)
    return all(made.ids == [ids[token]] for made, token in zip(encoded, tokens, strict=True))


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the regular expression by which a byte-level tokenizer splits words, in tiktoken's
    form.

    Return None if the tokenizer does anything else, or uses another expression.
    """
    outer = pre_tokenizer or {}
    *before, last = outer.get("pretokenizers") or [outer]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": not before}
    if {**byte_level, "trim_offsets": last.get("trim_offsets")} != last:
        return None
    if not before:
        return _PATTERNS[_GPT2]
    (split, *others), pattern = before, before[0].get("pattern", {})
    plain = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return _PATTERNS.get(pattern.get("Regex")) if split == plain and not others else None


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's characters for the 256 bytes: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
