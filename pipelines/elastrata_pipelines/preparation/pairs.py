"""Sentence pairs for next-sentence prediction (Devlin et al., 2018, section 3.1, task 2)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastrata_pipelines.hashing import combine_one, key, mix_one, uniform_one
from elastrata_pipelines.preparation.samples import Ints, Samples, Tokens, pair_extra

_SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')\]])\s+|\n+""")
_CUT, _RANDOM = 1, 2
# The second part always gets at least an eighth of the room.
_LEAST_SHARE = 8


@dataclass(frozen=True)
class PairFrame:
    """Token ids that a tokenizer adds to a pair: prefix A middle B suffix."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    has_segments: bool = True
    """Whether the tokenizer gives type 1 to B and the suffix, and type 0 to the rest, as
    training does."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a pair that belong to neither text."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences at final punctuation and line ends."""
    # A heuristic, which is good enough for pairs.
    return [part for part in _SENTENCE_END.split(text) if part and not part.isspace()]


def make_pairs(
    documents: Sequence[Sequence[Tokens]],
    ids: Sequence[int],
    frame: PairFrame,
    *,
    seq_len: int,
    min_tokens: int,
    dtype: np.dtype[Any],
) -> Samples:
    """Make pairs from documents, which are lists of tokenised sentences.

    Consecutive sentences are collected until they fill a sample, and divided at a random place, a
    seam. Seams of different documents whose second parts have similar sizes become partners. A
    random bit decides whether partners keep their second parts or exchange them. All choices are
    hashes of (document, pair number).

    Args:
        documents: token ids of each document's sentences. A single sentence is divided in the
            middle, and a document of one token yields nothing.
        ids: identity of each document.
        frame: the tokenizer's frame of a pair.
        seq_len: maximum number of tokens in a pair.
        min_tokens: minimum number of tokens in a pair, without those of the frame.
        dtype: integer type of the tokens.
    """
    room = seq_len - frame.num_tokens
    seams = [
        seam
        for document, (sentences, identity) in enumerate(zip(documents, ids, strict=True))
        for seam in _seams(sentences, document, identity, room)
    ]
    out_ids: list[int] = []
    framed: list[tuple[Tokens, bytes]] = []
    for number, partner in _partners(seams):
        seam = seams[number]
        # All lengths are fixed before the random bit is drawn, so that they reveal nothing about
        # it; and nearly no text is lost or used twice.
        first, second, is_next = _pair(seam, seams[partner], room)
        if len(first) + len(second) >= min_tokens:
            out_ids.append(seam.sample_id)
            framed.append(_add_frame(first, second, is_next, frame, dtype))
    return Samples(
        ids=np.array(out_ids, dtype=np.uint64),
        lengths=np.array([len(tokens) for tokens, _ in framed], dtype=np.int64),
        tokens=np.concatenate([np.empty(0, dtype), *(tokens for tokens, _ in framed)]),
        extras=tuple(extra for _, extra in framed),
    )


def _add_frame(
    first: Tokens, second: Tokens, is_next: bool, frame: PairFrame, dtype: np.dtype[Any]
) -> tuple[Tokens, bytes]:
    """Return the ids of a pair, and the other bytes that a shard stores of it."""
    parts = [frame.prefix, first, frame.middle, second, frame.suffix]
    tokens = np.concatenate([np.asarray(part, dtype=dtype) for part in parts])
    start = len(frame.prefix) + len(first) + len(frame.middle)
    return tokens, pair_extra(start, is_next)


@dataclass(frozen=True)
class _Seam:
    """A place between two sentences of a document, and the text on both sides."""

    sample_id: int
    document: int
    first: Tokens
    following: Tokens
    """Text after the seam, to the end of the document."""
    room: int
    """Maximum number of tokens in the second part."""

    @property
    def shape(self) -> tuple[bool, int, int]:
        """Sort key by which partners are found."""
        size = len(self.following)
        # Second parts that end with their document are matched with each other; otherwise the end
        # of the text would reveal which pairs are random.
        return size < self.room, min(size, self.room), self.sample_id


def _seams(sentences: Sequence[Tokens], document: int, identity: int, room: int) -> Iterator[_Seam]:
    # The empty array does not change the type of the tokens.
    tokens = np.concatenate([np.empty(0, np.uint16), *sentences])
    if len(tokens) < 2:
        return
    bounds = _bounds(sentences)
    last = len(bounds) - 2
    begin = number = 0
    while begin <= last:
        # A last single sentence is joined with the one before it.
        begin = min(begin, last - 1)
        filled = int(np.searchsorted(bounds, bounds[begin] + room))
        end = min(max(begin + 2, filled), last + 1)
        sample_id = combine_one(identity, number)
        middle = begin + 1 + int(_draw(sample_id, _CUT) * (end - begin - 1))
        first, following = tokens[bounds[begin] : bounds[middle]], tokens[bounds[middle] :]
        second_room = max(room - len(first), room // _LEAST_SHARE, 1)
        yield _Seam(sample_id, document, first, following, second_room)
        begin, number = end, number + 1


def _bounds(sentences: Sequence[Tokens]) -> Ints:
    """Return the start of each sentence, and the end of the last; a single sentence counts as
    two."""
    lengths = [len(sentence) for sentence in sentences]
    if len(lengths) == 1:
        lengths = [lengths[0] // 2, lengths[0] - lengths[0] // 2]
    return np.cumsum([0, *lengths], dtype=np.int64)


def _partners(seams: Sequence[_Seam]) -> Iterator[tuple[int, int]]:
    """Yield each seam with its partner, in order of seams; of another document if possible.

    With an odd number, the last seam shares the partner of another one. A single seam has no
    partner, and is left out.
    """
    partners: dict[int, int] = {}
    # All of one document.
    waiting: list[int] = []
    for number in sorted(range(len(seams)), key=lambda number: seams[number].shape):
        if waiting and seams[waiting[-1]].document != seams[number].document:
            other = waiting.pop()
            partners |= {number: other, other: number}
        else:
            waiting.append(number)
    for one, other in zip(waiting[::2], waiting[1::2], strict=False):
        partners |= {one: other, other: one}
    if len(waiting) % 2 and partners:
        partners[waiting[-1]] = max(partners)
    yield from sorted(partners.items())


def _draw(sample_id: int, purpose: int) -> float:
    return uniform_one(mix_one(combine_one(sample_id, key(purpose))))


def _pair(seam: _Seam, partner: _Seam, room: int) -> tuple[Tokens, Tokens, bool]:
    """Return the first part, the second part, and whether the second one follows the first."""
    size = min(seam.room, len(seam.following), len(partner.following))
    is_next = _draw(min(seam.sample_id, partner.sample_id), _RANDOM) < 0.5
    second = (seam if is_next else partner).following[:size]
    return seam.first[max(0, len(seam.first) + size - room) :], second, is_next
