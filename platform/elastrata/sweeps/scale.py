"""The scale of a sweep's pictures: which values have a place on the axis, and which an edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastrata.sweeps.standings import Standings, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM = 0.12
"""The share of an axis below the best value and, where nothing is cut off, above the worst."""
_MOST_LISTED = 8
_OUTLIER = 3.0
"""Values farther above the best half than this many of its widths are drawn at the edge."""


@dataclass(frozen=True)
class Scale:
    """Which values of the metric are drawn where they are, and which at the edge of a picture:
    what is far worse than the better half would flatten all the rest."""

    sign: float
    """1 where small values are good, else -1."""
    ends: tuple[float, float] | None
    """The best and the worst value that is drawn where it is; None: all are."""

    @classmethod
    def of(cls, standings: Standings) -> Scale:
        """For all reports of all trials."""
        sign = 1.0 if standings.mode == "min" else -1.0
        values = sorted(
            sign * report.value(standings.metric)
            for trial in standings.trials.values()
            for report in trial.reports
            if math.isfinite(report.value(standings.metric))
        )
        if len(values) < 4:
            return cls(sign, None)
        best, middle = values[0], values[len(values) // 2]
        worst = best + _OUTLIER * (middle - best)
        is_cut = middle > best and values[-1] > worst
        return cls(sign, (sign * best, sign * worst) if is_cut else None)

    def is_beyond(self, value: float) -> bool:
        """Whether a value is drawn at the edge."""
        return self.ends is not None and self.sign * value > self.sign * self.ends[1]

    def shown(self, trial: Trial, standings: Standings) -> float:
        """Where a trial's newest value is drawn; NaN where it has none that counts."""
        value = trial.value(standings.metric) if trial.counts else math.nan
        return self.ends[1] if self.ends and self.is_beyond(value) else value

    def limit(self, axes: Axes) -> None:
        """Cuts an axis off there, and leaves room for what is written below its best value."""
        axes.margins(y=_ROOM)
        if self.ends:
            best, worst = self.ends
            axes.set_ylim(*sorted((best - _ROOM * (worst - best), worst)))

    def note(self, standings: Standings) -> str:
        """A line about the trials that are not drawn where they are; maybe empty."""
        trials = standings.trials.values()
        beyond = [t.id for t in trials if t.counts and self.is_beyond(t.value(standings.metric))]
        lost = [t.id for t in trials if t.is_over and not t.counts]
        parts = [
            *([f"beyond the axis, drawn at its edge: {_listed(beyond)}"] if beyond else []),
            *([f"diverged or failed: {_listed(lost)}"] if lost else []),
        ]
        return f"Trials {'; '.join(parts)}." if parts else ""


def _listed(ids: Sequence[str]) -> str:
    more = len(ids) - _MOST_LISTED
    return ", ".join(ids[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
