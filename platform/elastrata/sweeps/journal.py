"""The journal of a sweep, and the trials that its entries describe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from elastrata.step.events import TrainingError
from elastrata_pipelines.errors import UserError

State = Literal["running", "finished", "stopped", "diverged", "failed"]
"""`finished`: all steps are done; `stopped`: the scheduler ended it; `diverged`: its loss was not
finite; `failed`: an error ended it."""


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """Copy of another trial's state by population based training."""

    source: str
    """Id of the other trial."""
    step: int
    """Optimizer steps done in the copied state."""
    values: Mapping[str, Any]
    """The values with which the trial continues, by dotted key."""
    metrics: Mapping[str, float]
    """The evaluation of the copied state, before its first step."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """State of a trial after an evaluation."""

    step: int
    """Optimizer steps done."""
    samples: int
    tokens: int
    seconds: float
    """Time in steps and evaluations since the previous report."""
    metrics: Mapping[str, float]
    """The evaluation after that step, by metric name."""
    steps: Sequence[Mapping[str, float]] = ()
    """The steps since the previous report: `step`, and metrics by name."""
    state: State = "running"
    text: str = ""
    """The error, in one line; empty without one."""
    copied: StateCopy | None = None
    """The copy that the trial made since the previous report."""

    def value(self, metric: str) -> float:
        """Return the metric, or NaN if the report has none."""
        return self.metrics.get(metric, math.nan)


@dataclass
class Trial:
    """One point of a sweep, with its state and reports."""

    id: str
    """A number in the order of the suggestions: `0000`..."""
    values: dict[str, Any]
    """Current values by dotted key; population based training changes them."""
    state: State = "running"
    text: str = ""
    reports: list[Report] = field(default_factory=list)
    copies: list[StateCopy] = field(default_factory=list)
    """Each copy that it made of another trial's state."""

    @property
    def is_over(self) -> bool:
        """True once the trial can send no more reports."""
        return self.state != "running"

    @property
    def counts(self) -> bool:
        """True if the trial can be the best: it has a report and has not failed or diverged."""
        return self.state not in ("diverged", "failed") and bool(self.reports)

    @property
    def last(self) -> Report | None:
        """The newest report; None without one."""
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
        """Return the newest value of a metric, or NaN without a report."""
        return self.last.value(metric) if self.last else math.nan


_NOT_FINITE = "not finite"


def classify_error(error: Exception) -> tuple[State, str]:
    """Return the state of a trial that raised this error, and the reason in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    # A diverged trial is a result of the search; any other error may be a fault of the setup.
    if isinstance(error, TrainingError) and _NOT_FINITE in text:
        return "diverged", text
    return "failed", f"{type(error).__name__}: {text}"


LAUNCHED = "launched"
"""Kind of the first entry of every launch."""
SUGGESTED, REPORTED, COPIED, CONCLUDED = "suggested", "reported", "copied", "concluded"
"""Kinds of entries: a point to try, a report of a trial, a copied state, the end of a trial."""
_ABOUT_A_TRIAL = (SUGGESTED, REPORTED, COPIED, CONCLUDED)


class Standings:
    """All trials of a sweep with their reports, built from the journal's entries."""

    def __init__(self, metric: str, mode: str, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self.metric, self.mode = metric, mode
        self.trials: dict[str, Trial] = {}
        """Trials by id, in the order of their suggestions."""
        for entry in entries:
            self.apply(entry)

    def apply(self, entry: Mapping[str, Any]) -> None:
        """Apply the next entry of the journal.

        Raises:
            UserError: the entry names a trial that is unknown, or suggests one a second time.
        """
        if entry["kind"] in _ABOUT_A_TRIAL:
            self._check_trial_id(entry["kind"], entry["trial"])
        match entry["kind"]:
            case "suggested":
                self.trials[entry["trial"]] = Trial(id=entry["trial"], values=dict(entry["values"]))
            case "reported":
                self.trials[entry["trial"]].reports.append(read_report(entry))
            case "copied":
                trial = self.trials[entry["trial"]]
                keys = ("source", "step", "values", "metrics")
                trial.copies.append(StateCopy(**{key: entry[key] for key in keys}))
                trial.values = dict(entry["values"])
            case "concluded":
                trial = self.trials[entry["trial"]]
                trial.state, trial.text = entry["state"], entry["text"]

    def _check_trial_id(self, kind: str, trial: str) -> None:
        # An altered or merged journal is refused: replaying it would give other suggestions.
        is_new = kind == SUGGESTED
        if is_new == (trial in self.trials):
            what = "was suggested before" if is_new else "was never suggested"
            raise UserError(
                f"the sweep's journal: '{kind}' of trial {trial!r}, which {what} (altered)"
            )

    def best(self) -> Trial | None:
        """Return the trial with the best newest value, the first of equals; None if no trial has
        one."""
        sign = 1.0 if self.mode == "min" else -1.0
        ranked = [
            (sign * trial.value(self.metric), trial.id)
            for trial in self.trials.values()
            if trial.counts and math.isfinite(trial.value(self.metric))
        ]
        # Among equal values the smallest id wins, which was suggested first.
        return self.trials[min(ranked)[1]] if ranked else None


def report_entry(trial: str, report: Report) -> dict[str, Any]:
    """Return the journal entry of a report. Its steps are left to the trial's own history."""
    fields = asdict(report)
    for key in ("steps", "state", "text", "copied"):
        del fields[key]
    return {"trial": trial, **fields}


def read_report(entry: Mapping[str, Any]) -> Report:
    """Return the report in an entry of the journal."""
    keys = ("step", "samples", "tokens", "seconds", "metrics")
    return Report(**{key: entry[key] for key in keys})
