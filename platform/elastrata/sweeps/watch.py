"""The watch over a sweep: what Ray Tune's trials report, noted in the journal and on the record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial

from elastrata.sweeps.report import Report
from elastrata.sweeps.standings import CONCLUDED, COPIED, REPORTED, Standings, report_entry
from elastrata.sweeps.trainable import REPORT


class Watch(Callback):
    """Called by Tune in the driver, one event after the other: there is one writer.

    Args:
        standings: of the sweep.
        note: takes an entry of the journal.
        told: called with a trial's id and its report, also with one that is not news.
        warn: called with one line about what did not go well and goes on.
    """

    def __init__(
        self,
        standings: Standings,
        note: Callable[[dict[str, Any]], None],
        told: Callable[[str, Report], None],
        warn: Callable[[str], None],
    ) -> None:
        self._standings, self._note, self._told, self._warn = standings, note, told, warn

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: Any, **info: Any
    ) -> None:
        """A report has come, and the scheduler has decided."""
        report: Report = result.pop(REPORT)
        known = self._standings.trials[trial.trial_id]
        self._told(trial.trial_id, report)
        if report.copied:
            self._note({"kind": COPIED, "trial": trial.trial_id, **asdict(report.copied)})
        is_news = not known.last or report.step > known.last.step or report.copied is not None
        if report.metrics and is_news:
            self._note({"kind": REPORTED, **report_entry(trial.trial_id, report)})
        if result.get("done"):
            state = "stopped" if report.state == "running" else report.state
            self._conclude(trial.trial_id, state, report.text)

    def on_trial_recover(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """The process of a trial died; another one goes on."""
        self._warn(f"trial {trial.trial_id}: its process died; going on from its checkpoint")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """The process of a trial died too often."""
        self._conclude(trial.trial_id, "failed", f"its process died{_reason(trial)}")

    def _conclude(self, id: str, state: str, text: str) -> None:
        if not self._standings.trials[id].is_over:
            self._note({"kind": CONCLUDED, "trial": id, "state": state, "text": text})


def _reason(trial: TuneTrial) -> str:
    error = trial.get_error()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] if error else []
    return f": {lines[-1][:200]}" if lines else ""
