"""Rows: samples stored end to end without padding, as zero-copy views of one buffer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import U64, combine, key, uniform


def mixture_ids(sources: npt.ArrayLike, sample_ids: npt.ArrayLike) -> U64:
    """Return the identities of a mixture's samples; source numbers and ids broadcast against
    each other."""
    return combine(np.asarray(sources, np.uint64), sample_ids)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """n samples with T tokens in total. A slice `rows[a:b]` does not copy."""

    sample_ids: npt.NDArray[np.uint64]
    """Shape [n]."""
    epochs: npt.NDArray[np.int64]
    """Shape [n]: epoch in which each sample is read; part of the key of its random numbers."""
    lengths: npt.NDArray[np.int64]
    """Shape [n]; sums to T."""
    tokens: npt.NDArray[Any]
    """Shape [T], uint16 or uint32: token ids of the samples, end to end."""
    boundaries: tuple[npt.NDArray[np.int32], ...] | None = None
    """Packed data only: offsets in each sample at which further documents start."""
    second_starts: npt.NDArray[np.int64] | None = None
    """Pairs only, shape [n]: offset of the second sentence in each sample."""
    is_next: npt.NDArray[np.bool_] | None = None
    """Pairs only, shape [n]: whether the second sentence followed the first in its document."""
    sources: npt.NDArray[np.int32] | None = None
    """Mixtures only, shape [n]: number of each sample's source."""
    source_names: tuple[str, ...] = ()
    """Mixtures only: names of all sources, by number."""

    @property
    def identities(self) -> U64:
        """Identity of each sample that is unique in the run, shape [n]."""
        # Two sources may have the same sample ids.
        return (
            self.sample_ids if self.sources is None else mixture_ids(self.sources, self.sample_ids)
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def source_tokens(self) -> dict[str, int]:
        """Tokens of each source, by name; empty without a mixture."""
        if self.sources is None:
            return {}
        counted = np.bincount(self.sources, self.lengths, minlength=len(self.source_names))
        return {name: int(count) for name, count in zip(self.source_names, counted, strict=True)}

    @property
    def segment_starts(self) -> npt.NDArray[np.int64]:
        """First tokens of samples and of the documents packed in them, ascending, shape [G]."""
        starts: npt.NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        if self.boundaries is None:
            return starts
        inner = [start + offsets for start, offsets in zip(starts, self.boundaries, strict=True)]
        return np.unique(np.concatenate([starts, *inner]))

    @property
    def segment_lengths(self) -> npt.NDArray[np.int64]:
        """Lengths of the samples or packed documents in which tokens attend to each other, shape
        [G]."""
        return np.diff(np.append(self.segment_starts, len(self.tokens)))

    def __getitem__(self, part: slice) -> Rows:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError("Rows are sliced in steps of 1")
        first = int(self.lengths[:start].sum())
        return self._part(start, stop, first, first + int(self.lengths[start:stop].sum()))

    def split(self, cuts: npt.NDArray[np.int64]) -> list[Rows]:
        """Return the parts between consecutive `cuts`, for example a rank's micro-batches."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])[cuts]
        return [
            self._part(start, stop, first, last)
            for (start, stop), (first, last) in zip(
                pairwise(cuts.tolist()), pairwise(ends.tolist()), strict=True
            )
        ]

    def _part(self, start: int, stop: int, first_token: int, last_token: int) -> Rows:
        return Rows(
            sample_ids=self.sample_ids[start:stop],
            epochs=self.epochs[start:stop],
            lengths=self.lengths[start:stop],
            tokens=self.tokens[first_token:last_token],
            boundaries=None if self.boundaries is None else self.boundaries[start:stop],
            second_starts=None if self.second_starts is None else self.second_starts[start:stop],
            is_next=None if self.is_next is None else self.is_next[start:stop],
            sources=None if self.sources is None else self.sources[start:stop],
            source_names=self.source_names,
        )


class SampleRng:
    """Counter-based random number generator keyed by (seed, epoch, sample_id).

    Every draw names a `stream`: a small number that separates independent uses (which tokens to
    mask, which replacements to choose...). The same call always returns the same numbers.

    Args:
        seed: seed of the run.
        rows: samples to draw for.
    """

    def __init__(self, seed: int, rows: Rows) -> None:
        self._lengths = rows.lengths
        # Keyed by sample and not by position, so that numbers depend neither on the number of ranks
        # nor on how a batch is dealt.
        self._keys: U64 = combine(
            combine(key(seed), rows.epochs.astype(np.uint64)), rows.sample_ids
        )

    def per_sample(self, stream: int) -> npt.NDArray[np.float64]:
        """Return one uniform number in [0, 1) per sample, shape [n]."""
        return uniform(combine(self._keys, np.uint64(key(stream))))

    def hashes(self, stream: int) -> U64:
        """Return one 64-bit hash per token, shape [T], samples end to end."""
        counters = np.arange(int(self._lengths.sum()), dtype=np.uint64)
        starts = np.cumsum(self._lengths) - self._lengths
        # Tokens are counted from the start of their sample, independent of the sample's place in
        # the batch.
        counters -= np.repeat(starts.astype(np.uint64), self._lengths)
        keys = combine(self._keys, np.uint64(key(stream)))
        return combine(np.repeat(keys, self._lengths), counters)

    def per_token(self, stream: int) -> npt.NDArray[np.float64]:
        """Return one uniform number in [0, 1) per token, shape [T], samples end to end."""
        return uniform(self.hashes(stream))
