"""Randomness that belongs to a sample: the same whichever rank, batch or restart it is drawn in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import U64, combine, key, uniform
from elastrata_pipelines.rows import Rows


class SampleRng:
    """A counter-based generator keyed by (seed, epoch, sample_id).

    Every draw names a `stream`: a small number that tells independent uses apart (which tokens to
    mask, what to replace them with...). The same call always returns the same numbers.

    Args:
        seed: the run's seed.
        rows: the samples to draw for.
    """

    def __init__(self, seed: int, rows: Rows) -> None:
        self._lengths = rows.lengths
        self._keys: U64 = combine(
            combine(key(seed), rows.epochs.astype(np.uint64)), rows.sample_ids
        )

    def per_sample(self, stream: int) -> npt.NDArray[np.float64]:
        """One uniform number in [0, 1) per sample, shape [n]."""
        return uniform(combine(self._keys, np.uint64(key(stream))))

    def hashes(self, stream: int) -> U64:
        """One 64-bit hash per token, shape [T], samples end to end."""
        counters = np.arange(int(self._lengths.sum()), dtype=np.uint64)
        starts = np.cumsum(self._lengths) - self._lengths
        counters -= np.repeat(starts.astype(np.uint64), self._lengths)
        keys = combine(self._keys, np.uint64(key(stream)))
        return combine(np.repeat(keys, self._lengths), counters)

    def per_token(self, stream: int) -> npt.NDArray[np.float64]:
        """One uniform number in [0, 1) per token, shape [T], samples end to end."""
        return uniform(self.hashes(stream))
