"""The journal of a sweep, and the trials that its entries describe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from elastrata.step.events import TrainingError
from elastrata_pipelines.errors import UserError

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
    """The values that the trial goes on with."""
    metrics: Mapping[str, float]
    """The evaluation of the copy, before its first step."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a trial after an evaluation."""

    step: int
    """Optimizer steps done."""
    samples: int
    tokens: int
    seconds: float
    """Steps and evaluations since the report before."""
    metrics: Mapping[str, float]
    """The evaluation after that step, by metric name."""
    steps: Sequence[Mapping[str, float]] = ()
    """The steps since the report before: `step`, and metrics by name."""
    state: State = "running"
    text: str = ""
    """The error, in one line."""
    copied: Copied | None = None
    """A copy since the report before."""

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


_NOT_FINITE = "not finite"


def failure(error: Exception) -> tuple[State, str]:
    """The state of a trial that raised this, and the reason in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    if isinstance(error, TrainingError) and _NOT_FINITE in text:
        return "diverged", text
    return "failed", f"{type(error).__name__}: {text}"


LAUNCHED = "launched"
"""Kind of the entry with which a launch begins."""
SUGGESTED, REPORTED, COPIED, CONCLUDED = "suggested", "reported", "copied", "concluded"
"""Kinds of entries: a point to try, a report of a trial, a state taken over, the end of a trial."""
_ABOUT_A_TRIAL = (SUGGESTED, REPORTED, COPIED, CONCLUDED)


class Standings:
    """All trials of a sweep with their reports, entry by entry."""

    def __init__(self, metric: str, mode: str, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self.metric, self.mode = metric, mode
        self.trials: dict[str, Trial] = {}
        """By id, in the order they were suggested."""
        for entry in entries:
            self.apply(entry)

    def apply(self, entry: Mapping[str, Any]) -> None:
        """Takes one more entry of the journal.

        Raises:
            UserError: it is about a trial that there is not, or that there was already.
        """
        if entry["kind"] in _ABOUT_A_TRIAL:
            self._check(entry["kind"], entry["trial"])
        match entry["kind"]:
            case "suggested":
                self.trials[entry["trial"]] = Trial(id=entry["trial"], values=dict(entry["values"]))
            case "reported":
                self.trials[entry["trial"]].reports.append(read_report(entry))
            case "copied":
                trial = self.trials[entry["trial"]]
                keys = ("source", "step", "values", "metrics")
                trial.copies.append(Copied(**{key: entry[key] for key in keys}))
                trial.values = dict(entry["values"])
            case "concluded":
                trial = self.trials[entry["trial"]]
                trial.state, trial.text = entry["state"], entry["text"]

    def _check(self, kind: str, trial: str) -> None:
        is_new = kind == SUGGESTED
        if is_new == (trial in self.trials):
            what = "was suggested before" if is_new else "was never suggested"
            raise UserError(
                f"the sweep's journal: '{kind}' of trial {trial!r}, which {what} (altered)"
            )

    def best(self) -> Trial | None:
        """The trial whose newest value is the best; the first of equals, None where none counts."""
        sign = 1.0 if self.mode == "min" else -1.0
        ranked = [
            (sign * trial.value(self.metric), trial.id)
            for trial in self.trials.values()
            if trial.counts and math.isfinite(trial.value(self.metric))
        ]
        return self.trials[min(ranked)[1]] if ranked else None


def report_entry(trial: str, report: Report) -> dict[str, Any]:
    """The entry of a report in the journal; the steps are in the trial's own history."""
    kept = asdict(report)
    for key in ("steps", "state", "text", "copied"):
        del kept[key]
    return {"trial": trial, **kept}


def read_report(entry: Mapping[str, Any]) -> Report:
    """The report in an entry of the journal."""
    keys = ("step", "samples", "tokens", "seconds", "metrics")
    return Report(**{key: entry[key] for key in keys})
