"""Packing: tokenised documents to samples of at most `seq_len` tokens. Numbers in, numbers out."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import U64, combine
from elastrata_pipelines.preparation.samples import Ints, Samples, Tokens


@dataclass(frozen=True)
class Frame:
    """The ids a tokenizer puts around a text."""

    prefix: tuple[int, ...] = ()
    """Before every sample, such as [CLS]."""
    suffix: tuple[int, ...] = ()
    """After every sample, such as [SEP]."""
    end: tuple[int, ...] = ()
    """After the last token of a document only, such as GPT-2's <|endoftext|>."""

    @property
    def num_tokens(self) -> int:
        """Tokens that every sample, or piece of a packed one, carries in addition to its text."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class Texts:
    """Tokenised documents end to end."""

    ids: U64
    """Identity of each document (and copy), shape [n]."""
    lengths: Ints
    """Shape [n]; sums to T."""
    tokens: Tokens
    """Shape [T]."""


@dataclass(frozen=True)
class _Fragments:
    """Parts of documents: half-open ranges of a token array, without frame."""

    ids: U64
    begins: Ints
    ends: Ints


def cut(texts: Texts, frame: Frame, *, seq_len: int, min_tokens: int) -> Samples:
    """Packing `none`: every document by itself, cut every `seq_len` tokens, frame included."""
    fragments, tokens = _fragments(texts, frame, seq_len, min_tokens)
    lengths = fragments.ends - fragments.begins
    framed = lengths + frame.num_tokens
    out = np.empty(int(framed.sum()), dtype=tokens.dtype)
    is_text = np.ones(len(out), dtype=bool)
    starts = np.cumsum(framed) - framed
    for offset, token in enumerate(frame.prefix):
        out[starts + offset], is_text[starts + offset] = token, False
    for offset, token in enumerate(frame.suffix):
        place = starts + len(frame.prefix) + lengths + offset
        out[place], is_text[place] = token, False
    out[is_text] = tokens[_inside(fragments, len(tokens))]
    return Samples(ids=fragments.ids, lengths=framed, tokens=out)


def pack_concat(texts: Texts, frame: Frame, *, seq_len: int, min_tokens: int) -> Samples:
    """Packing `concat`: documents end to end, a new sample every `seq_len` tokens."""
    ids, lengths, tokens = _with_end(texts, frame, min_tokens)
    bins: list[list[int]] = []
    pieces: list[tuple[int, int, int]] = []  # document, begin, end
    room = 0
    begin = 0
    for document, length in enumerate(lengths.tolist()):
        position, end = begin, begin + length
        while position < end:
            if room <= frame.num_tokens:
                bins.append([])
                room = seq_len
            take = min(end - position, room - frame.num_tokens)
            bins[-1].append(len(pieces))
            pieces.append((document, position, position + take))
            position += take
            room -= take + frame.num_tokens
        begin = end
    return _gather(bins, _numbered(ids, pieces), tokens, frame)


def pack_best_fit(texts: Texts, frame: Frame, *, seq_len: int, min_tokens: int) -> Samples:
    """Packing `best_fit`: only documents longer than a sample are cut; then best-fit decreasing.

    Each fragment, from the longest on, goes to the fullest sample that has room for it.
    """
    fragments, tokens = _fragments(texts, frame, seq_len, min_tokens)
    lengths = fragments.ends - fragments.begins + frame.num_tokens
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    rooms: list[int] = []  # the sizes of room that some sample has, sorted
    for fragment in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[fragment])
        at = bisect.bisect_left(rooms, need)
        if at == len(rooms):
            target, room = len(bins), seq_len
            bins.append([])
        else:
            room = rooms[at]
            target = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        bins[target].append(fragment)
        left = room - need
        if left:
            if not by_room[left]:
                bisect.insort(rooms, left)
            by_room[left].append(target)
    return _gather(bins, fragments, tokens, frame)


def _inside(fragments: _Fragments, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Which tokens lie in a fragment, shape [T]; fragments are in order and never overlap."""
    changes = np.zeros(num_tokens + 1, dtype=np.int8)
    np.add.at(changes, fragments.begins, 1)
    np.add.at(changes, fragments.ends, -1)
    return np.cumsum(changes[:-1], dtype=np.int8).astype(bool)


def _with_end(texts: Texts, frame: Frame, min_tokens: int) -> tuple[U64, Ints, Tokens]:
    """The documents of at least `min_tokens` tokens, each with the frame's end."""
    kept = texts.lengths >= min_tokens
    lengths = texts.lengths[kept]
    tokens = texts.tokens[np.repeat(kept, texts.lengths)]
    if frame.end:
        ends = np.repeat(np.cumsum(lengths), len(frame.end))
        tokens = np.insert(tokens, ends, np.tile(frame.end, len(lengths)).astype(tokens.dtype))
        lengths = lengths + len(frame.end)
    return texts.ids[kept], lengths, tokens


def _fragments(
    texts: Texts, frame: Frame, seq_len: int, min_tokens: int
) -> tuple[_Fragments, Tokens]:
    """Documents cut into fragments that fit a sample; those under `min_tokens` are left out."""
    ids, lengths, tokens = _with_end(texts, frame, min_tokens)
    size = seq_len - frame.num_tokens
    counts = -(-lengths // size)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(np.cumsum(lengths) - lengths, counts) + number * size
    ends = np.minimum(begins + size, np.repeat(np.cumsum(lengths), counts))
    text_ends = np.repeat(np.cumsum(lengths) - len(frame.end), counts)
    kept = np.minimum(ends, text_ends) - begins >= min_tokens
    fragment_ids = combine(np.repeat(ids, counts), number.astype(np.uint64))
    return _Fragments(fragment_ids[kept], begins[kept], ends[kept]), tokens


def _numbered(ids: U64, pieces: Sequence[tuple[int, int, int]]) -> _Fragments:
    """Fragments named by their document and their number in it."""
    table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    document = table[:, 0]
    first = np.searchsorted(document, document, side="left")
    number = (np.arange(len(document)) - first).astype(np.uint64)
    return _Fragments(combine(ids[document], number), table[:, 1], table[:, 2])


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """All indices start .. start + length - 1, range after range."""
    before = np.cumsum(lengths) - lengths
    ranges: Ints = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return ranges


def _gather(
    bins: Sequence[Sequence[int]], fragments: _Fragments, tokens: Tokens, frame: Frame
) -> Samples:
    """Samples out of bins of fragments, each fragment in its frame."""
    parts: list[Tokens] = []
    lengths, extras = [], []
    prefix, suffix = (np.array(ids, dtype=tokens.dtype) for ids in (frame.prefix, frame.suffix))
    for inside in bins:
        starts, length = [], 0
        for begin, end in _bounds(inside, fragments):
            starts.append(length)
            parts += [prefix, tokens[begin:end], suffix]
            length += end - begin + frame.num_tokens
        lengths.append(length)
        extras.append(np.array(starts[1:], dtype="<i4").tobytes())
    firsts = np.array([inside[0] for inside in bins], dtype=np.int64)
    return Samples(
        ids=fragments.ids[firsts],
        lengths=np.array(lengths, dtype=np.int64),
        tokens=np.concatenate([tokens[:0], *parts]),
        extras=tuple(extras),
    )


def _bounds(inside: Sequence[int], fragments: _Fragments) -> Iterator[tuple[int, int]]:
    for fragment in inside:
        yield int(fragments.begins[fragment]), int(fragments.ends[fragment])
