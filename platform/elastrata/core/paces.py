"""The paces of ranks: work by second of each, from steps that are noisy."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
