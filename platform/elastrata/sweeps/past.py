"""The past of a trial: what its own history says it has done, as if it were reported now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from elastrata.checkpoints.commit import commits
from elastrata.core.record import StepRecord
from elastrata.run import history
from elastrata.run.entries import metrics_of, step_record
from elastrata.run.history import restore_history
from elastrata.sweeps.standings import LAUNCHED, Report
from elastrata_pipelines.storage import Storage

CURVES = ("train/loss", "train/lr", "train/gradient_norm", "progress/tokens")
"""The metrics that are told of every step; the rest is in the run's history."""


@dataclass(frozen=True)
class Past:
    """Entries of a run's history that count."""

    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @classmethod
    def of(
        cls, run: Storage, warn: Callable[[str], None] = lambda line: None, step: int | None = None
    ) -> Self:
        """The past of a run, up to a step; empty where the run is not there.

        Lines that died with their writer and that its newest checkpoint has are written first.
        `warn` is called with a line for each part of the history that is not as it was written;
        default: it is, or will be, told elsewhere.
        """
        for commit in commits(run.sub("checkpoints"))[:1]:
            restore_history(run.sub("history"), commit)
        written = history.look(run.sub("history"))
        for line in written.problems:
            warn(line)
        entries = written.entries
        if any(entry["kind"] == LAUNCHED for entry in entries):
            warn(f"{run.uri('history')}: not the history of a run, but the journal of a sweep")
        counting = history.effective_steps(entries), history.surviving_evaluations(entries)
        return cls(*([e for e in part if step is None or e["step"] <= step] for part in counting))

    def unreported(self) -> list[Mapping[str, float]]:
        """Metrics of the steps after the last evaluation."""
        last = max((entry["step"] for entry in self.evaluations), default=0)
        return [_curve(entry) for entry in self.steps if entry["step"] > last]

    def curves(self) -> list[Mapping[str, float]]:
        """Metrics of every step."""
        return [_curve(entry) for entry in self.steps]

    def reports(self) -> Iterator[Report]:
        """A report for every evaluation, each with the steps before it."""
        by_step = {entry["step"]: entry for entry in self.steps}
        before = 0
        for entry in self.evaluations:
            if entry["step"] <= before or entry["step"] not in by_step:  # damaged, as was told
                continue
            own = [
                by_step[step] for step in range(before + 1, entry["step"] + 1) if step in by_step
            ]
            yield Report(
                step=entry["step"],
                samples=own[-1]["samples"],
                tokens=own[-1]["tokens"],
                seconds=sum(step["seconds"] for step in own),
                metrics=metrics_of(entry),
                steps=tuple(map(_curve, own)),
            )
            before = entry["step"]


def curve(record: StepRecord) -> Mapping[str, float]:
    """The metrics that are told of a step."""
    metrics = record.to_metrics()
    return {"step": record.step, **{name: metrics[name] for name in CURVES}}


def _curve(entry: Mapping[str, Any]) -> Mapping[str, float]:
    return curve(step_record(entry, "the trial's history"))
