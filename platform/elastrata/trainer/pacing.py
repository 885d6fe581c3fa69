"""Pacing: rank 0's look at how fast all ranks are. It names slow ones, and asks for hands by
measured speeds. Knows no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elastrata.core.events import Event, Paced, Slowed
from elastrata.core.paces import Estimate, Floats, Paces, certain
from elastrata.core.speed_controller import SpeedController
from elastrata.core.step_message import Effort
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.speeds import Speeds, least_samples

STEPS_BETWEEN_LOOKS = 4
SLOW, USUAL = 0.8, 0.9
"""Shares of the pace of others: below the first one a rank is slow, above the second it is not."""
_LEAST_STEPS = 6


@dataclass(frozen=True)
class RankPlace:
    """Where a rank computes."""

    node: str
    """The node's id."""
    host: str
    device: str
    """The kind of device."""


class Pacing:
    """Looks at the efforts of all ranks, every few steps.

    Args:
        places: of all ranks.
        data_ranks: of all ranks: which ones compute the same samples.
        deals: whether steps are dealt by measured speeds.
        tell: called with what is found.
    """

    def __init__(
        self,
        places: Sequence[RankPlace],
        data_ranks: Sequence[int],
        *,
        deals: bool,
        tell: Callable[[Event], None],
    ) -> None:
        self._places, self._tell = places, tell
        self._data_ranks = np.array(data_ranks)
        self._paces = Paces(len(places))
        self._controller = SpeedController(max(data_ranks) + 1) if deals else None
        self._slow: set[int] = set()

    def __call__(self, rank_step: RankStep, efforts: Sequence[Effort]) -> None:
        """A step is done, with these efforts by rank; none where they are not known."""
        seconds = np.array([effort.seconds for effort in efforts])
        if not len(seconds) or not seconds.all():
            return
        step = rank_step.step
        self._paces.add(step, seconds, np.array([effort.work for effort in efforts]))
        if step % STEPS_BETWEEN_LOOKS:
            return
        estimate = self._paces.estimate()
        self._name(step, estimate)
        if self._controller:
            groups = slowest_members(estimate, self._data_ranks)
            speeds = self._controller.decide(step, rank_step.speeds, groups)
            if speeds:
                paces = tuple(np.nan_to_num(estimate.paces).tolist())
                self._tell(Paced(step=step, speeds=speeds, paces=paces))

    def _name(self, step: int, estimate: Estimate) -> None:
        """Tells of ranks that are slow now, and of those that are not any more."""
        doubts = certain(len(self._places), estimate.num_steps) * estimate.errors
        for rank, factor in enumerate(self._factors(estimate.paces).tolist()):
            is_known = estimate.num_steps[rank] >= _LEAST_STEPS and np.isfinite(factor)
            if not is_known:
                continue
            is_slow = factor < SLOW and -np.log(factor) > doubts[rank]
            if is_slow and rank not in self._slow:
                self._slow.add(rank)
                self._tell(self._slowed(step, rank, factor, estimate))
            elif factor > USUAL and rank in self._slow:
                self._slow.remove(rank)
                self._tell(self._slowed(step, rank, factor, estimate, is_over=True))

    def _factors(self, paces: Floats) -> Floats:
        """Every rank's pace over the median of the others of its kind; NaN where it has none."""
        kinds = np.array([place.device for place in self._places])
        factors = np.full(len(paces), np.nan)
        for kind in set(kinds.tolist()):
            members = np.flatnonzero((kinds == kind) & np.isfinite(paces))
            if len(members) > 1:
                factors[members] = paces[members] / medians_of_others(paces[members])
        return factors

    def _slowed(
        self, step: int, rank: int, factor: float, estimate: Estimate, *, is_over: bool = False
    ) -> Slowed:
        place = self._places[rank]
        return Slowed(
            step=step,
            rank=rank,
            node=place.node,
            host=place.host,
            device=place.device,
            factor=round(factor, 3),
            since=int(estimate.since[rank]),
            is_over=is_over,
        )


def idle_ranks(speeds: Speeds, samples: int) -> Iterator[str]:
    """A line for each data rank that is too slow to get a row of a batch of so many samples."""
    for rank, speed in enumerate(speeds):
        least = least_samples(speeds, rank)
        if samples < least:
            yield (
                f"data rank {rank}, at {speed / max(speeds):.2g} of the speed of the fastest, is "
                f"too slow to get one of {samples} samples a step; a batch_size of {least} would "
                "give it one"
            )


def medians_of_others(values: Floats) -> Floats:
    """For each of several numbers the median of all but it."""
    order = np.argsort(values, kind="stable")
    ordered, places = values[order], np.empty(len(values), dtype=np.int64)
    places[order] = np.arange(len(values))

    def other(number: int) -> Floats:
        """The others' number in ascending order."""
        return np.asarray(ordered[number + (places <= number)])

    last = len(values) - 2
    return np.asarray((other(last // 2) + other((last + 1) // 2)) / 2)


def slowest_members(estimate: Estimate, data_ranks: np.ndarray) -> Estimate:
    """The estimate of every data rank: that of its slowest rank.

    Args:
        estimate: of all ranks.
        data_ranks: the data rank of each.
    """
    by_pace = np.argsort(-np.nan_to_num(estimate.paces), kind="stable")
    slowest = np.zeros(data_ranks.max() + 1, dtype=np.int64)
    slowest[data_ranks[by_pace]] = by_pace  # the last one stays
    return Estimate(
        paces=estimate.paces[slowest],
        errors=estimate.errors[slowest],
        num_steps=estimate.num_steps[slowest],
        since=estimate.since[slowest],
    )
