"""Pacing: how fast ranks are, which of them are slow, and by which speeds steps are dealt.

Rank 0 estimates the paces of all ranks from steps that are noisy (`Paces`), decides when other
speeds would make steps shorter (`SpeedController`), and sends both as events (`Pacing`). Knows no
Ray.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata.step.events import Event, Paced, Slowed
from elastrata.step.step_message import Effort
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.speeds import Speeds, least_samples, quantized

Floats = npt.NDArray[np.float64]

WINDOW = 64
"""Steps that an estimate looks back at most."""
RECENT = 6
"""The newest steps, which tell whether a rank has become another: then older ones count no more."""
_LEAST_SPREAD = 0.01
_LEAST_JUMP = 0.05
_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for normal noise."""
_OF_DEVIATION = 1.4826
"""Standard deviation over the median distance from the median, for normal noise."""
LEAST_GAIN = 0.04
"""Of a step's time: for less the speeds stay."""
PATIENCE = 48
"""Steps until speeds that were asked for and did not come are asked for again."""
_SETTLING = 8
"""Steps that speeds stay, once steps are dealt by them."""
STEPS_BETWEEN_LOOKS = 4
SLOW, USUAL = 0.8, 0.9
"""Shares of the pace of others: below the first one a rank is slow, above the second it is not."""
_LEAST_STEPS = 6


def certain(num_ranks: int, num_steps: Floats | float) -> Floats:
    """So many standard errors are no chance, among so many ranks and after so many steps: chance
    gets there less than once in thousands of steps, also where the spread is known from few."""
    several = 4.8 + 0.3 * math.log(num_ranks)
    return np.asarray(several * (1 + 6 / np.maximum(num_steps, 1)))


@dataclass(frozen=True)
class Estimate:
    """Of every rank; arrays of shape [ranks]."""

    paces: Floats
    """Work by second; NaN where nothing is known."""
    errors: Floats
    """Standard errors, as shares of the pace."""
    num_steps: Floats
    """That the estimate rests on."""
    since: npt.NDArray[np.int64]
    """The step since which the rank has this pace."""


class Paces:
    """Estimates by the median of the newest steps, which no outlier moves. A rank that has become
    faster or slower, beyond its noise, is looked at anew.

    Args:
        num_ranks: in all.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self._logs: deque[Floats] = deque(maxlen=WINDOW)
        self._since = np.zeros(num_ranks, dtype=np.int64)

    def add(self, step: int, seconds: Floats, work: Floats) -> None:
        """A step is done.

        Args:
            step: its number.
            seconds: own ones of every rank, shape [ranks].
            work: of every rank; 0 where it had fillers alone.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(work / seconds)
        if not self._steps:
            self._since[:] = step
        self._steps.append(step)
        self._logs.append(np.where(np.isfinite(logs), logs, np.nan))

    def estimate(self) -> Estimate:
        """By all steps so far; also drops those of a rank that has become another."""
        logs, steps = np.stack(self._logs), np.array(self._steps)
        counts = steps[:, None] >= self._since
        middle, spread, number = _middle(np.where(counts, logs, np.nan))
        newest = _middle(logs[-RECENT:])
        before = _middle(np.where(counts, logs, np.nan)[:-RECENT])
        spreads = np.maximum(before[1], _LEAST_SPREAD)
        error = _OF_MEDIAN * spreads * np.sqrt(1 / RECENT + 1 / np.maximum(before[2], 1))
        limit = np.maximum(certain(self._num_ranks, before[2]) * error, _LEAST_JUMP)
        jumped = (before[2] >= RECENT) & (np.abs(newest[0] - before[0]) > limit)
        if jumped.any():
            self._since[jumped] = steps[-RECENT]
            return self.estimate()
        spread = np.maximum(spread, _median(np.maximum(spread, _LEAST_SPREAD)[:, None])[0])
        errors = _OF_MEDIAN * spread / np.sqrt(np.maximum(number, 1))
        since = np.where(number > 0, self._since, steps[-1])
        return Estimate(np.exp(middle), errors, number, since)


def _middle(logs: Floats) -> tuple[Floats, Floats, Floats]:
    """Median, spread and number of the values that are known, by column."""
    if not len(logs):
        nothing = np.full(logs.shape[1], np.nan)
        return nothing, nothing, np.zeros(logs.shape[1])
    middle, number = _median(logs), np.sum(~np.isnan(logs), axis=0).astype(np.float64)
    spread = _OF_DEVIATION * _median(np.abs(logs - middle))
    return middle, spread, number


def _median(values: Floats) -> Floats:
    """By column, of what is not NaN."""
    ordered = np.sort(np.ascontiguousarray(values.T), axis=1)  # NaN comes last
    last = np.maximum(np.sum(~np.isnan(values), axis=0) - 1, 0)
    columns = np.arange(values.shape[1])
    return np.asarray((ordered[columns, last // 2] + ordered[columns, (last + 1) // 2]) / 2)


class SpeedController:
    """Asks for other speeds where the steps would be shorter by more than noise explains: small
    gains must be seen for longer than large ones, and none is taken back without the same proof.

    Args:
        num_ranks: number of data ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._asked: Speeds = ()
        self._asked_at = self._in_effect_since = 0

    def decide(self, step: int, dealt_by: Sequence[int], estimate: Estimate) -> Speeds | None:
        """The speeds that steps to come should be dealt by; None: those that there are.

        Args:
            step: the last one that is done.
            dealt_by: the speeds it was dealt by; none: all are equally fast.
            estimate: of the data ranks' paces.
        """
        if self._is_waiting(step, tuple(dealt_by)):
            return None
        known = np.isfinite(estimate.paces)
        if not known.any() or estimate.num_steps[known].min() < _LEAST_STEPS:
            return None
        speeds = np.asarray(dealt_by or (1,) * self._num_ranks, dtype=np.float64)
        paces = _completed(estimate.paces, speeds)
        gain, doubt = _gain(speeds, paces, estimate)
        if gain <= max(LEAST_GAIN, doubt):
            return None
        wanted = quantized(paces.tolist())
        if wanted == tuple(dealt_by):
            return None
        self._asked, self._asked_at = wanted, step
        return wanted

    def _is_waiting(self, step: int, dealt_by: Speeds) -> bool:
        """Whether asked-for speeds are on their way, or have only come."""
        if not self._asked:
            return False
        if dealt_by != self._asked:
            self._in_effect_since = step + 1
            return step - self._asked_at < PATIENCE
        return step - self._in_effect_since < _SETTLING


def _completed(paces: Floats, speeds: Floats) -> Floats:
    """Paces with those of ranks that had no rows, which keep their speeds."""
    known = np.isfinite(paces)
    scale = np.median(paces[known] / speeds[known])
    return np.where(known, paces, speeds * scale)


def _gain(speeds: Floats, paces: Floats, estimate: Estimate) -> tuple[float, float]:
    """What the slowest rank takes longer than if all were dealt to by these paces; and the least
    that is no chance."""
    times = speeds / paces
    slowest = int(np.argmax(times))
    ideal = speeds.sum() / paces.sum()
    shares = paces / paces.sum()
    shares[slowest] = 1 - shares[slowest]
    errors = np.nan_to_num(estimate.errors)
    error = float(np.sqrt(np.sum((shares * errors) ** 2)))
    steps = float(estimate.num_steps[np.isfinite(estimate.paces)].min())
    return float(times[slowest] / ideal) - 1, float(certain(len(speeds), steps)) * error


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
