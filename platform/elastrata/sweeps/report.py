"""The report of a trial: where it stands after an evaluation. Schedulers and observers get this."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["running", "finished", "stopped", "diverged", "failed"]
"""`finished`: all steps are done; `stopped`: by the scheduler; `diverged`: its loss was not finite;
`failed`: an error ended it."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A trial has taken over the state of another one."""

    source: str
    """Id of the other trial."""
    step: int
    """Steps done in that state."""
    values: Mapping[str, Any]
    """What the trial goes on with."""
    metrics: Mapping[str, float]
    """Of an evaluation of the copy, before its first step."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a trial has come to."""

    step: int
    """Optimizer steps done."""
    samples: int
    tokens: int
    seconds: float
    """Steps and evaluations since the report before."""
    metrics: Mapping[str, float]
    """Of the evaluation after that step, by metric name."""
    steps: Sequence[Mapping[str, float]] = ()
    """The steps since the report before: `step`, and metrics by name."""
    state: State = "running"
    text: str = ""
    """What went wrong, in one line."""
    copied: Copied | None = None
    """What happened since the report before."""

    def value(self, metric: str) -> float:
        """The metric, or NaN where the report has none."""
        return self.metrics.get(metric, math.nan)


@dataclass
class Trial:
    """One point of a sweep, and what came of it."""

    id: str
    """A number in the order of the suggestions: `0000`..."""
    values: dict[str, Any]
    """By dotted key; as they are now, where population based training has changed them."""
    state: State = "running"
    text: str = ""
    reports: list[Report] = field(default_factory=list)
    copies: list[Copied] = field(default_factory=list)
    """When it took over the state of another trial."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.state != "running"

    @property
    def counts(self) -> bool:
        """Whether it can be the best."""
        return self.state not in ("diverged", "failed") and bool(self.reports)

    @property
    def last(self) -> Report | None:
        """The newest report."""
        return self.reports[-1] if self.reports else None

    @property
    def tokens(self) -> int:
        """Real tokens seen."""
        return self.last.tokens if self.last else 0

    @property
    def seconds(self) -> float:
        """Time in steps and evaluations."""
        return sum(report.seconds for report in self.reports)

    def value(self, metric: str) -> float:
        """The newest value of a metric; NaN where there is none."""
        return self.last.value(metric) if self.last else math.nan
