"""The quality of an order: its distance from an ideal shuffle, by statistics of the function alone.

Documents lie at random in the stored order (`prepare` sorts samples by hash), so the neighbours of
a document are any two stored samples. Scores are differences from the ideal shuffle's mean in its
own standard deviations: those of a good order are as those of a normal distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import combine, key, mix, uniform
from elastrata_pipelines.mixture import UNITS, Mixture
from elastrata_pipelines.order import Ints, Order

Reals = npt.NDArray[np.float64]

_BINS = 5
_LAGS = (1, 2, 7, 64)
_RUN = 20_000
_PLACES, _POSITIONS = 3, 4


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Scores of an order, over several seeds."""

    draws: int
    """Samples that were followed."""
    positions: float
    """Chi-square of stored place by position."""
    epochs: float
    """Chi-square of position by position in the next epoch."""
    neighbours: float
    """Mean distance of two samples of a document in an epoch; of an ideal shuffle a third of it."""
    autocorrelation: float
    """The largest of samples some positions apart, either way."""

    @property
    def worst(self) -> float:
        """The largest of all scores, either way."""
        scores = self.positions, self.epochs, self.neighbours, self.autocorrelation
        return max(map(abs, scores))


def measure(order: Order, draws: int) -> Quality:
    """Follows stored samples, drawn at random, to their positions in two epochs.

    Args:
        order: of any size; its seed is the first of those tried.
        draws: samples to follow, over all seeds.
    """
    size = order.num_samples
    each = int(np.clip(order.num_stripes // 10, 2, 25))
    orders = [
        Order(
            num_samples=size,
            stripe_size=order.stripe_size,
            window_stripes=order.window_stripes,
            seed=order.seed + number,
        )
        for number in range(-(-draws // each))
    ]
    stored = [_drawn(one, each) for one in orders]
    places, first, second = (
        np.concatenate(parts) / size
        for parts in (
            stored,
            [positions_of(*both, epoch=0) for both in zip(orders, stored, strict=True)],
            [positions_of(*both, epoch=1) for both in zip(orders, stored, strict=True)],
        )
    )
    distances = np.abs(first[0::2] - first[1::2])
    return Quality(
        draws=len(places),
        positions=chi_square(places, first, size),
        epochs=chi_square(first, second, size),
        neighbours=_distance_score(distances, size),
        autocorrelation=max((autocorrelation(one) for one in orders[:3]), key=abs),
    )


def positions_of(order: Order, stored: Ints, epoch: int) -> Ints:
    """The places in an epoch of samples, by their places in stored order: the order's inverse."""
    stripes = stored // order.stripe_size
    found = np.empty(len(stored), np.int64)
    for window, begin, end in _windows_with(order, epoch, stripes):
        places = order.places(epoch * order.num_samples + begin, end - begin)
        inside = places.stripes * order.stripe_size + places.rows
        for entry in window:
            found[entry] = begin + int(np.flatnonzero(inside == stored[entry])[0])
    return found


def _windows_with(order: Order, epoch: int, stripes: Ints) -> list[tuple[Sequence[int], int, int]]:
    """For each of the stripes the window that reads it: which entries, its first position and its
    end."""
    read, starts = order.epoch_stripes(epoch)
    rank = np.empty(order.num_stripes, np.int64)
    rank[read] = np.arange(order.num_stripes)
    windows = rank[stripes] // order.window_stripes
    return [
        (np.flatnonzero(windows == window).tolist(), int(starts[window]), int(starts[window + 1]))
        for window in np.unique(windows)
    ]


def _drawn(order: Order, count: int) -> Ints:
    """Different stored places, in pairs."""
    random = combine(key(order.seed, _PLACES), np.arange(4 * count, dtype=np.uint64))
    places = np.unique((uniform(random) * order.num_samples).astype(np.int64))
    shuffled = places[np.argsort(mix(places), kind="stable")][:count]
    return shuffled[: len(shuffled) // 2 * 2]


def chi_square(first: Reals, second: Reals, size: int) -> float:
    """The score of two numbers from 0 to 1 having nothing to do with each other."""
    bins = min(_BINS, size)
    counts = np.zeros((bins, bins))
    np.add.at(counts, ((first * bins).astype(int), (second * bins).astype(int)), 1)
    expected = counts.sum(0) * counts.sum(1)[:, None] / counts.sum()
    freedom = (bins - 1) ** 2
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def _distance_score(distances: Reals, size: int) -> float:
    """Of two different places among n the mean distance is (n + 1) / 3 and the variance
    (n + 1) (n - 2) / 18."""
    mean, variance = (size + 1) / 3 / size, (size + 1) * (size - 2) / 18 / size**2
    return float((distances.mean() - mean) / np.sqrt(variance / len(distances)))


def autocorrelation(order: Order) -> float:
    """The largest score, either way, of samples some positions apart. Each has a random number, as
    its document has: what lies together in the order has nothing to do with it."""
    count = min(_RUN, order.num_samples)
    offset = int(uniform(mix([key(order.seed, _POSITIONS)]))[0] * (order.num_samples - count))
    places = order.places(offset, count)
    stored = places.stripes * order.stripe_size + places.rows
    values = uniform(combine(key(order.seed, _PLACES), stored.astype(np.uint64)))
    values = values - values.mean()
    scores = [
        float((values[:-lag] * values[lag:]).mean() / values.var() * np.sqrt(count - lag))
        for lag in _LAGS
        if lag < count // 2
    ]
    return max(scores, key=abs)


def share_error(mixture: Mixture, window: int, firsts: Sequence[int]) -> float:
    """The largest difference between the samples of a source in a window and its share of them.

    Args:
        mixture: of one leg, whose shares stay.
        window: positions.
        firsts: of the windows.
    """
    shares = np.array(mixture.legs[0].shares) / UNITS
    return max(
        float(np.abs(np.subtract(mixture.counts(first + window), mixture.counts(first))
                     - window * shares).max())
        for first in firsts
    )  # fmt: skip
