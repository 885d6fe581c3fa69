"""The order: assigns a stored sample to every position, by arithmetic alone.

Positions continue from epoch to epoch: position p is place p % N of epoch p // N. Epoch e reads the
stripes in a permutation keyed by (seed, e), and shuffles samples uniformly inside each window of
`window_stripes` consecutive stripes of that permutation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import key, permutation

Ints = npt.NDArray[np.int64]

# Parts of hash keys that make both kinds of permutations independent.
_STRIPES, _WINDOW = 1, 2


@dataclass(frozen=True)
class Places:
    """Storage places of samples: three arrays of equal length with one entry per requested
    position."""

    epochs: Ints
    stripes: Ints
    rows: Ints
    """Row inside the stripe."""

    def part(self, entries: Ints) -> Places:
        """Return the places of some entries."""
        return Places(self.epochs[entries], self.stripes[entries], self.rows[entries])


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of a data set of `num_samples` samples in stripes of `stripe_size`.

    The last stripe is short if `stripe_size` does not divide `num_samples`.
    """

    num_samples: int
    stripe_size: int
    window_stripes: int
    """Number of stripes that are shuffled together. More stripes make batches more random and
    reading more expensive."""
    seed: int

    def __post_init__(self) -> None:
        if min(self.num_samples, self.stripe_size, self.window_stripes) < 1:
            raise ValueError("num_samples, stripe_size and window_stripes must be at least 1")

    def places(self, first: int, count: int) -> Places:
        """Return the places of the samples at positions first .. first + count - 1."""
        parts: list[tuple[int, Ints, Ints]] = []
        position, stop = first, first + count
        while position < stop:
            epoch, offset = divmod(position, self.num_samples)
            _, starts = _epoch_stripes(self, epoch)
            window = int(np.searchsorted(starts, offset, side="right")) - 1
            begin, end = int(starts[window]), int(starts[window + 1])
            take = slice(offset - begin, min(end - begin, offset - begin + stop - position))
            stripe, row = _window(self, epoch, window)
            parts.append((epoch, stripe[take], row[take]))
            position += take.stop - take.start
        return Places(
            epochs=np.repeat(
                np.array([epoch for epoch, _, _ in parts], dtype=np.int64),
                np.array([len(row) for _, _, row in parts], dtype=np.int64),
            ),
            stripes=np.concatenate([stripe for _, stripe, _ in parts] or [np.empty(0, np.int64)]),
            rows=np.concatenate([row for _, _, row in parts] or [np.empty(0, np.int64)]),
        )

    def epoch_stripes(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the stripes in the order in which the epoch reads them, and the window starts
        followed by N."""
        return _epoch_stripes(self, epoch)

    @property
    def num_stripes(self) -> int:
        """Number of stripes, including the short one."""
        return -(-self.num_samples // self.stripe_size)

    def stripe_sizes(self, stripes: Ints) -> Ints:
        """Return the number of samples in each of `stripes`."""
        last = self.num_samples - (self.num_stripes - 1) * self.stripe_size
        return np.where(stripes == self.num_stripes - 1, last, self.stripe_size)


# A group of steps can cross into the next epoch, and each source of a mixture has its own epochs.
@lru_cache(maxsize=8)
def _epoch_stripes(order: Order, epoch: int) -> tuple[Ints, Ints]:
    stripes = permutation(order.num_stripes, key(order.seed, epoch, _STRIPES))
    # The short stripe may be anywhere in the permutation, so windows differ in size.
    ends = np.cumsum(order.stripe_sizes(stripes))
    starts = np.concatenate([[0], ends])[:: order.window_stripes]
    if starts[-1] != order.num_samples:
        starts = np.append(starts, order.num_samples)
    return stripes, starts


# Consecutive batches fall into the same windows.
@lru_cache(maxsize=64)
def _window(order: Order, epoch: int, window: int) -> tuple[Ints, Ints]:
    """Return the stripe and the row of each sample of a window, shuffled."""
    stripes, _ = _epoch_stripes(order, epoch)
    inside = stripes[window * order.window_stripes : (window + 1) * order.window_stripes]
    sizes = order.stripe_sizes(inside)
    stripe = np.repeat(inside, sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    shuffled = permutation(len(row), key(order.seed, epoch, _WINDOW, window))
    return stripe[shuffled], row[shuffled]
