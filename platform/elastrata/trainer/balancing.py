"""Pacing: throughput of each rank, detection of slow ranks, and the speeds to deal steps by.

Rank 0 estimates the pace of every rank from noisy step times (`PaceEstimator`), decides when other
speeds would make steps shorter (`SpeedController`), and sends both as events (`PaceMonitor`). It
does not depend on Ray.
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
from elastrata_pipelines.speeds import Speeds, least_samples, quantize_speeds

Floats = npt.NDArray[np.float64]

WINDOW = 64
"""Largest number of steps that an estimate uses."""
RECENT = 6
"""Number of newest steps that are compared with the older ones. If they differ, the rank's pace has
changed, and the older steps are dropped."""
# Floors: a few similar steps would otherwise pass for certainty.
_LEAST_SPREAD = 0.01
_LEAST_JUMP = 0.05
_MEDIAN_ERROR_FACTOR = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for normal noise."""
_DEVIATION_FACTOR = 1.4826
"""Standard deviation over the median absolute deviation, for normal noise."""
LEAST_GAIN = 0.04
"""Smallest saving, as a share of the step time, for which speeds are changed."""
PATIENCE = 48
"""Steps after which requested speeds that have not taken effect are requested again."""
_SETTLING = 8
"""Steps for which speeds are kept after they took effect."""
STEPS_BETWEEN_LOOKS = 4
SLOW_BELOW, RECOVERED_ABOVE = 0.8, 0.9
"""Pace relative to other ranks of the kind: below `SLOW_BELOW` a rank is reported as slow, above
`RECOVERED_ABOVE` as recovered."""
_LEAST_CHANGE = 0.1
"""Smallest relative change of a slow rank's pace that is reported again."""
_LEAST_STEPS = 6


def significance_limit(num_ranks: int, num_steps: Floats | float) -> Floats:
    """Return the number of standard errors that exclude chance, given the number of ranks and of
    steps that an estimate uses.

    Chance exceeds it less than once in thousands of steps, also if few steps determine the spread.
    """
    several = 4.8 + 0.3 * math.log(num_ranks)
    return np.asarray(several * (1 + 6 / np.maximum(num_steps, 1)))


@dataclass(frozen=True)
class Estimate:
    """Estimates for every rank, as arrays of shape [ranks]."""

    paces: Floats
    """Work per second; NaN if unknown."""
    errors: Floats
    """Standard errors, relative to the pace."""
    num_steps: Floats
    """Number of steps that each estimate uses."""
    since: npt.NDArray[np.int64]
    """The step since which the rank has this pace."""


class PaceEstimator:
    """Estimates of the paces by medians of the newest steps, which are robust against outliers. If
    a rank's pace changes by more than its noise, its estimate starts again.

    Args:
        num_ranks: number of all ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self._logs: deque[Floats] = deque(maxlen=WINDOW)
        self._since = np.zeros(num_ranks, dtype=np.int64)

    def add(self, step: int, seconds: Floats, work: Floats) -> None:
        """Add the measurements of a step.

        Args:
            step: number of the step.
            seconds: each rank's own compute time, shape [ranks].
            work: each rank's work, shape [ranks]; 0 if it had only filler micro-batches.
        """
        # Log paces, so that noise that is a share of the pace has the same spread on every rank.
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(work / seconds)
        if not self._steps:
            self._since[:] = step
        self._steps.append(step)
        self._logs.append(np.where(np.isfinite(logs), logs, np.nan))

    def estimate(self) -> Estimate:
        """Return the estimate by all steps so far. Drops the older steps of ranks whose pace
        changed."""
        logs, steps = np.stack(self._logs), np.array(self._steps)
        counts = steps[:, None] >= self._since
        middle, spread, number = _median_and_spread(np.where(counts, logs, np.nan))
        newest = _median_and_spread(logs[-RECENT:])
        before = _median_and_spread(np.where(counts, logs, np.nan)[:-RECENT])
        spreads = np.maximum(before[1], _LEAST_SPREAD)
        # Standard error of the difference between the medians of newest and older steps.
        error = _MEDIAN_ERROR_FACTOR * spreads * np.sqrt(1 / RECENT + 1 / np.maximum(before[2], 1))
        limit = np.maximum(significance_limit(self._num_ranks, before[2]) * error, _LEAST_JUMP)
        jumped = (before[2] >= RECENT) & (np.abs(newest[0] - before[0]) > limit)
        if jumped.any():
            # The older steps belong to another pace. The recursion ends, as a rank needs RECENT
            # older steps to be tested again.
            self._since[jumped] = steps[-RECENT]
            return self.estimate()
        # A spread from few steps is often far too small, so no rank's is below the median of all
        # ranks.
        spread = np.maximum(spread, _median(np.maximum(spread, _LEAST_SPREAD)[:, None])[0])
        errors = _MEDIAN_ERROR_FACTOR * spread / np.sqrt(np.maximum(number, 1))
        # A rank without rows has no pace yet, so its entry starts now.
        since = np.where(number > 0, self._since, steps[-1])
        return Estimate(np.exp(middle), errors, number, since)


def _median_and_spread(logs: Floats) -> tuple[Floats, Floats, Floats]:
    """Return median, spread and number of the values that are not NaN, by column."""
    if not len(logs):
        nothing = np.full(logs.shape[1], np.nan)
        return nothing, nothing, np.zeros(logs.shape[1])
    middle, number = _median(logs), np.sum(~np.isnan(logs), axis=0).astype(np.float64)
    spread = _DEVIATION_FACTOR * _median(np.abs(logs - middle))
    return middle, spread, number


def _median(values: Floats) -> Floats:
    """Return the median of each column, without NaN."""
    # np.nanmedian would warn about columns without a value.
    ordered = np.sort(np.ascontiguousarray(values.T), axis=1)  # NaN comes last
    last = np.maximum(np.sum(~np.isnan(values), axis=0) - 1, 0)
    columns = np.arange(values.shape[1])
    return np.asarray((ordered[columns, last // 2] + ordered[columns, (last + 1) // 2]) / 2)


class SpeedController:
    """Controller that requests other speeds if they shorten the steps by more than noise explains.
    A small gain needs more steps as evidence than a large one, in both directions.

    Args:
        num_ranks: number of data ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._requested: Speeds = ()
        self._requested_at = self._in_effect_since = 0

    def decide(self, step: int, dealt_by: Sequence[int], estimate: Estimate) -> Speeds | None:
        """Return the speeds to deal later steps by, or None to keep the present ones.

        Args:
            step: the last finished step.
            dealt_by: the speeds that the step was dealt by; empty if all are equal.
            estimate: of the data ranks' paces.
        """
        if self._is_waiting(step, tuple(dealt_by)):
            return None
        has_pace = np.isfinite(estimate.paces)
        if not has_pace.any() or estimate.num_steps[has_pace].min() < _LEAST_STEPS:
            return None
        speeds = np.asarray(dealt_by or (1,) * self._num_ranks, dtype=np.float64)
        paces = _fill_unknown_paces(estimate.paces, speeds)
        gain, doubt = _estimate_gain(speeds, paces, estimate)
        if gain <= max(LEAST_GAIN, doubt):
            return None
        wanted = quantize_speeds(paces.tolist())
        if wanted == tuple(dealt_by):
            return None
        # Steps are dealt ahead, so the new speeds take effect only some steps later.
        self._requested, self._requested_at = wanted, step
        return wanted

    def _is_waiting(self, step: int, dealt_by: Speeds) -> bool:
        """Return whether requested speeds have not taken effect yet, or took effect only
        recently."""
        if not self._requested:
            return False
        if dealt_by != self._requested:
            self._in_effect_since = step + 1
            return step - self._requested_at < PATIENCE
        return step - self._in_effect_since < _SETTLING


def _fill_unknown_paces(paces: Floats, speeds: Floats) -> Floats:
    """Return the paces, with a value by their present speed for ranks that had no rows."""
    has_pace = np.isfinite(paces)
    scale = np.median(paces[has_pace] / speeds[has_pace])
    return np.where(has_pace, paces, speeds * scale)


def _estimate_gain(speeds: Floats, paces: Floats, estimate: Estimate) -> tuple[float, float]:
    """Return how much longer the slowest rank takes than if steps were dealt by these paces (as a
    share), and the smallest share that is significant."""
    times = speeds / paces
    slowest = int(np.argmax(times))
    ideal = speeds.sum() / paces.sum()
    shares = paces / paces.sum()
    # Error of the slowest pace over the sum of all paces, by linear propagation: the slowest rank
    # stands in the sum, too.
    shares[slowest] = 1 - shares[slowest]
    errors = np.nan_to_num(estimate.errors)
    error = float(np.sqrt(np.sum((shares * errors) ** 2)))
    steps = float(estimate.num_steps[np.isfinite(estimate.paces)].min())
    return float(times[slowest] / ideal) - 1, float(significance_limit(len(speeds), steps)) * error


@dataclass(frozen=True)
class RankPlace:
    """The machine and device of a rank."""

    node: str
    """Ray's id of the node."""
    host: str
    device: str
    """The kind of device."""


class PaceMonitor:
    """Evaluation of the times of all ranks every few steps, on rank 0.

    Args:
        places: machine and device of every rank.
        data_ranks: data rank of every rank; ranks with the same one compute the same samples.
        deals: whether steps are dealt by measured speeds.
        tell: called with each event.
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
        self._paces = PaceEstimator(len(places))
        self._controller = SpeedController(max(data_ranks) + 1) if deals else None
        self._slow: dict[int, float] = {}
        """Reported pace of each slow rank, relative to its kind."""

    def __call__(self, rank_step: RankStep, efforts: Sequence[Effort]) -> None:
        """Add a finished step with the efforts by rank; empty if they are unknown."""
        seconds = np.array([effort.seconds for effort in efforts])
        # Zero means that a rank has no measurement yet.
        if not len(seconds) or not seconds.all():
            return
        step = rank_step.step
        self._paces.add(step, seconds, np.array([effort.work for effort in efforts]))
        if step % STEPS_BETWEEN_LOOKS:
            return
        estimate = self._paces.estimate()
        self._report_slow_ranks(step, estimate)
        if self._controller:
            groups = estimate_data_ranks(estimate, self._data_ranks)
            speeds = self._controller.decide(step, rank_step.speeds, groups)
            if speeds:
                paces = tuple(np.nan_to_num(estimate.paces).tolist())
                self._tell(Paced(step=step, speeds=speeds, paces=paces))

    def _report_slow_ranks(self, step: int, estimate: Estimate) -> None:
        """Send an event for each rank that has become slow, and for each that has recovered."""
        doubts = significance_limit(len(self._places), estimate.num_steps) * estimate.errors
        for rank, factor in enumerate(self._factors(estimate.paces).tolist()):
            is_known = estimate.num_steps[rank] >= _LEAST_STEPS and np.isfinite(factor)
            if not is_known:
                continue
            # Two thresholds, so that a rank near one of them is not reported again and again.
            is_slow = factor < SLOW_BELOW and -np.log(factor) > doubts[rank]
            # Again if it has changed further: the recipe may exclude ranks below another limit.
            change = abs(np.log(factor / self._slow.get(rank, 1.0)))
            if is_slow and change > max(_LEAST_CHANGE, doubts[rank]):
                self._slow[rank] = factor
                self._tell(self._slowed_event(step, rank, factor, estimate))
            elif factor > RECOVERED_ABOVE and rank in self._slow:
                del self._slow[rank]
                self._tell(self._slowed_event(step, rank, factor, estimate, is_over=True))

    def _factors(self, paces: Floats) -> Floats:
        """Return every rank's pace over the median of the others of its kind; NaN if it has
        none."""
        kinds = np.array([place.device for place in self._places])
        factors = np.full(len(paces), np.nan)
        for kind in set(kinds.tolist()):
            members = np.flatnonzero((kinds == kind) & np.isfinite(paces))
            if len(members) > 1:
                factors[members] = paces[members] / medians_of_others(paces[members])
        return factors

    def _slowed_event(
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


def idle_rank_lines(speeds: Speeds, samples: int) -> Iterator[str]:
    """Yield a line for each data rank that is too slow to get a row of a batch of `samples`."""
    for rank, speed in enumerate(speeds):
        least = least_samples(speeds, rank)
        if samples < least:
            yield (
                f"data rank {rank}, at {speed / max(speeds):.2g} of the speed of the fastest, is "
                f"too slow to get one of {samples} samples a step; a batch_size of {least} would "
                "give it one"
            )


def medians_of_others(values: Floats) -> Floats:
    """Return for each number the median of all the others, in O(n log n)."""
    order = np.argsort(values, kind="stable")
    ordered, places = values[order], np.empty(len(values), dtype=np.int64)
    places[order] = np.arange(len(values))

    def other(number: int) -> Floats:
        """Return for each value the `number`-th of the others in ascending order."""
        return np.asarray(ordered[number + (places <= number)])

    last = len(values) - 2
    return np.asarray((other(last // 2) + other((last + 1) // 2)) / 2)


def estimate_data_ranks(estimate: Estimate, data_ranks: np.ndarray) -> Estimate:
    """Return the estimate of each data rank: that of its slowest rank.

    Args:
        estimate: of all ranks.
        data_ranks: the data rank of each rank.
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
