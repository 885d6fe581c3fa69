"""Packing: tokenised documents to samples of at most `seq_len` tokens. Numbers in, numbers out."""

from __future__ import annotations

import bisect
from array import array
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import U64, combine
from elastrata_pipelines.preparation.samples import Ints, Samples, Tokens

_TOKENS_AT_ONCE = 2**17


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

    def where(self, kept: npt.NDArray[np.bool_]) -> Texts:
        """Some of the documents; shape [n]."""
        if kept.all():
            return self
        return Texts(self.ids[kept], self.lengths[kept], self.tokens[np.repeat(kept, self.lengths)])


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
    return Samples(
        ids=fragments.ids,
        lengths=lengths + frame.num_tokens,
        tokens=_framed(fragments.begins, lengths, tokens, frame),
    )


def pack_concat(texts: Texts, frame: Frame, *, seq_len: int, min_tokens: int) -> Samples:
    """Packing `concat`: documents end to end, a new sample every `seq_len` tokens."""
    ids, lengths, tokens = _with_end(texts, frame, min_tokens)
    sizes, pieces = array("q"), array("q")  # of each sample; document, begin and end of each piece
    room = 0
    begin = 0
    for document, length in enumerate(lengths.tolist()):
        position, end = begin, begin + length
        while position < end:
            if room <= frame.num_tokens:
                sizes.append(0)
                room = seq_len
            take = min(end - position, room - frame.num_tokens)
            sizes[-1] += 1
            pieces.extend((document, position, position + take))
            position += take
            room -= take + frame.num_tokens
        begin = end
    fragments = _numbered(ids, np.array(pieces).reshape(-1, 3))
    return _gather(np.array(sizes), np.arange(len(pieces) // 3), fragments, tokens, frame)


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
    sizes = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
    order = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=int(sizes.sum()))
    del bins, by_room
    return _gather(sizes, order, fragments, tokens, frame)


def _with_end(texts: Texts, frame: Frame, min_tokens: int) -> tuple[U64, Ints, Tokens]:
    """The documents of at least `min_tokens` tokens, each with the frame's end."""
    texts = texts.where(texts.lengths >= min_tokens)
    lengths, tokens = texts.lengths, texts.tokens
    if frame.end:
        ends = np.repeat(np.cumsum(lengths), len(frame.end))
        tokens = np.insert(tokens, ends, np.tile(frame.end, len(lengths)).astype(tokens.dtype))
        lengths = lengths + len(frame.end)
    return texts.ids, lengths, tokens


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


def _numbered(ids: U64, table: Ints) -> _Fragments:
    """Fragments named by their document and their number in it.

    Args:
        ids: of the documents.
        table: document, begin and end of each fragment, shape [n, 3].
    """
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
    sizes: Ints, order: Ints, fragments: _Fragments, tokens: Tokens, frame: Frame
) -> Samples:
    """Samples out of fragments, each fragment in its frame.

    Args:
        sizes: fragments in each sample.
        order: the fragments of all samples, end to end.
        fragments: all there are.
        tokens: that they are parts of.
        frame: around each.
    """
    begins = fragments.begins[order]
    lengths = fragments.ends[order] - begins
    ends = np.cumsum(lengths + frame.num_tokens)
    lasts = np.cumsum(sizes)
    firsts = lasts - sizes
    bounds = np.concatenate([[0], ends])[np.concatenate([[0], lasts])]
    starts = (ends - lengths - frame.num_tokens - np.repeat(bounds[:-1], sizes)).astype("<i4")
    inner = zip((firsts + 1).tolist(), lasts.tolist(), strict=True)
    return Samples(
        ids=fragments.ids[order[firsts]],
        lengths=np.diff(bounds),
        tokens=_framed(begins, lengths, tokens, frame),
        extras=tuple(starts[first:last].tobytes() for first, last in inner),
    )


def _framed(begins: Ints, lengths: Ints, tokens: Tokens, frame: Frame) -> Tokens:
    """Ranges of tokens, each in its frame, end to end."""
    framed = lengths + frame.num_tokens
    ends = np.cumsum(framed)
    texts_at = ends - framed + len(frame.prefix)
    out = np.empty(int(framed.sum()), dtype=tokens.dtype)
    # some at a time: indices take many times the memory of the tokens that they stand for
    cuts = np.searchsorted(ends, np.arange(0, len(out), _TOKENS_AT_ONCE)).tolist()
    for first, last in pairwise([*cuts, len(lengths)]):
        some = slice(first, last)
        places = ranges(texts_at[some], lengths[some])
        out[places] = tokens[ranges(begins[some], lengths[some])]
    for offset, token in enumerate(frame.prefix):
        out[ends - framed + offset] = token
    for offset, token in enumerate(frame.suffix):
        out[texts_at + lengths + offset] = token
    return out
