"""The standings of a sweep: all its trials, from the entries of its journal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from elastrata.sweeps.report import Copied, Report, Trial
from elastrata_pipelines.errors import UserError

LAUNCHED = "launched"
"""Kind of the entry with which a launch begins."""
SUGGESTED, REPORTED, COPIED, CONCLUDED = "suggested", "reported", "copied", "concluded"
"""Kinds of entries: a point to try, a report of a trial, a state taken over, the end of a trial."""
_ABOUT_A_TRIAL = (SUGGESTED, REPORTED, COPIED, CONCLUDED)


class Standings:
    """What is known of the trials of a sweep, entry by entry."""

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
    """What the journal keeps of a report; the steps are in the trial's own history."""
    kept = asdict(report)
    for key in ("steps", "state", "text", "copied"):
        del kept[key]
    return {"trial": trial, **kept}


def read_report(entry: Mapping[str, Any]) -> Report:
    """The report in an entry of the journal."""
    keys = ("step", "samples", "tokens", "seconds", "metrics")
    return Report(**{key: entry[key] for key in keys})
