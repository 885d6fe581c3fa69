"""Packing: converts tokenised documents to samples of at most `seq_len` tokens, by arithmetic
alone."""

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
    """Token ids that a tokenizer adds to a text."""

    prefix: tuple[int, ...] = ()
    """Ids before every sample, such as [CLS]."""
    suffix: tuple[int, ...] = ()
    """Ids after every sample, such as [SEP]."""
    end: tuple[int, ...] = ()
    """Ids after the last token of a document only, such as GPT-2's <|endoftext|>."""

    @property
    def num_tokens(self) -> int:
        """Number of added tokens of every sample, or of every piece of a packed sample."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class Texts:
    """Tokenised documents, end to end."""

    ids: U64
    """Identity of each document (and copy), shape [n]."""
    lengths: Ints
    """Shape [n]; sums to T."""
    tokens: Tokens
    """Shape [T]."""

    def where(self, kept: npt.NDArray[np.bool_]) -> Texts:
        """Return the documents whose flag is set; `kept` has shape [n]."""
        if kept.all():
            return self
        return Texts(self.ids[kept], self.lengths[kept], self.tokens[np.repeat(kept, self.lengths)])


@dataclass(frozen=True)
class _Fragments:
    """Parts of documents: half-open ranges of a token array, without frame."""

    ids: U64
    begins: Ints
    ends: Ints


def split_documents(texts: Texts, frame: Frame, *, seq_len: int, min_tokens: int) -> Samples:
    """Pack as `none`: divide every document by itself into samples of `seq_len` tokens, frame
    included."""
    fragments, tokens = _fragments(texts, frame, seq_len, min_tokens)
    lengths = fragments.ends - fragments.begins
    return Samples(
        ids=fragments.ids,
        lengths=lengths + frame.num_tokens,
        tokens=_add_frames(fragments.begins, lengths, tokens, frame),
    )


def pack_concat(texts: Texts, frame: Frame, *, seq_len: int, min_tokens: int) -> Samples:
    """Pack as `concat`: concatenate documents, and begin a new sample every `seq_len` tokens."""
    ids, lengths, tokens = _with_end(texts, frame, min_tokens)
    # Number of pieces of each sample; document, begin and end of each piece.
    sizes, pieces = array("q"), array("q")
    room = 0
    begin = 0
    for document, length in enumerate(lengths.tolist()):
        position, end = begin, begin + length
        while position < end:
            # The frame alone would fill the rest of the sample.
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
    return _make_samples(np.array(sizes), np.arange(len(pieces) // 3), fragments, tokens, frame)


def pack_best_fit(texts: Texts, frame: Frame, *, seq_len: int, min_tokens: int) -> Samples:
    """Pack as `best_fit`: divide only documents longer than a sample, then pack best-fit
    decreasing.

    Each fragment, longest first, goes to the fullest sample that has room for it.
    """
    fragments, tokens = _fragments(texts, frame, seq_len, min_tokens)
    lengths = fragments.ends - fragments.begins + frame.num_tokens
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    # Sorted sizes of room that some sample has; bisection finds the fullest sample that fits.
    rooms: list[int] = []
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
    # Freed before the samples are built: Python lists take many times their memory.
    del bins, by_room
    return _make_samples(sizes, order, fragments, tokens, frame)


def _with_end(texts: Texts, frame: Frame, min_tokens: int) -> tuple[U64, Ints, Tokens]:
    """Return the documents of at least `min_tokens` tokens, each followed by the frame's end."""
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
    """Divide documents into fragments that fit a sample; leave out those below `min_tokens`."""
    ids, lengths, tokens = _with_end(texts, frame, min_tokens)
    size = seq_len - frame.num_tokens
    counts = -(-lengths // size)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(np.cumsum(lengths) - lengths, counts) + number * size
    ends = np.minimum(begins + size, np.repeat(np.cumsum(lengths), counts))
    text_ends = np.repeat(np.cumsum(lengths) - len(frame.end), counts)
    # The frame's end does not count towards `min_tokens`.
    is_kept = np.minimum(ends, text_ends) - begins >= min_tokens
    fragment_ids = combine(np.repeat(ids, counts), number.astype(np.uint64))
    return _Fragments(fragment_ids[is_kept], begins[is_kept], ends[is_kept]), tokens


def _numbered(ids: U64, table: Ints) -> _Fragments:
    """Return fragments with ids of their document and their number in it.

    Args:
        ids: ids of the documents.
        table: document, begin and end of each fragment, shape [n, 3].
    """
    document = table[:, 0]
    first = np.searchsorted(document, document, side="left")
    number = (np.arange(len(document)) - first).astype(np.uint64)
    return _Fragments(combine(ids[document], number), table[:, 1], table[:, 2])


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return all indices start .. start + length - 1, range after range."""
    before = np.cumsum(lengths) - lengths
    ranges: Ints = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return ranges


def _make_samples(
    sizes: Ints, order: Ints, fragments: _Fragments, tokens: Tokens, frame: Frame
) -> Samples:
    """Build samples from fragments, each with its frame.

    Args:
        sizes: number of fragments in each sample.
        order: fragments of all samples, end to end.
        fragments: all fragments.
        tokens: tokens of which the fragments are ranges.
        frame: frame of each fragment.
    """
    begins = fragments.begins[order]
    lengths = fragments.ends[order] - begins
    ends = np.cumsum(lengths + frame.num_tokens)
    lasts = np.cumsum(sizes)
    firsts = lasts - sizes
    bounds = np.concatenate([[0], ends])[np.concatenate([[0], lasts])]
    starts = (ends - lengths - frame.num_tokens - np.repeat(bounds[:-1], sizes)).astype("<i4")
    # The first piece of a sample starts at 0, which is not stored.
    inner = zip((firsts + 1).tolist(), lasts.tolist(), strict=True)
    return Samples(
        ids=fragments.ids[order[firsts]],
        lengths=np.diff(bounds),
        tokens=_add_frames(begins, lengths, tokens, frame),
        extras=tuple(starts[first:last].tobytes() for first, last in inner),
    )


def _add_frames(begins: Ints, lengths: Ints, tokens: Tokens, frame: Frame) -> Tokens:
    """Return ranges of tokens, each in its frame, end to end."""
    framed = lengths + frame.num_tokens
    ends = np.cumsum(framed)
    texts_at = ends - framed + len(frame.prefix)
    out = np.empty(int(framed.sum()), dtype=tokens.dtype)
    # In blocks, because indices take many times the memory of their tokens.
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
