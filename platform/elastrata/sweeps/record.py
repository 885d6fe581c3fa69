"""The record of a sweep: one run in MLflow, with one below it for every trial, by one writer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastrata.recipe.recipe import Recipe
from elastrata.run.facts import recipe_params
from elastrata.sweeps.past import Past
from elastrata.sweeps.standings import Report, State, Trial
from elastrata.tracking.models import LoadableModel
from elastrata.tracking.tracker import Status, Tracker
from elastrata_pipelines.storage import Storage

_STATUS: dict[State, Status] = {
    "finished": "FINISHED",
    "stopped": "FINISHED",
    "diverged": "FAILED",
    "failed": "FAILED",
}


class SweepRecord:
    """Passes on what happens. Its methods return at once and never raise.

    Args:
        whole: the open record of the sweep.
        folder: of the trials' runs.
    """

    def __init__(self, whole: Tracker, folder: Storage) -> None:
        self.whole = whole
        self._folder = folder
        self._parts: dict[str, Tracker] = {}

    def begin(self, trial: Trial, recipe: Recipe | None) -> None:
        """A trial begins, or is known from before: what a driver that died did not write of it is
        written now.

        Args:
            trial: with all that is known of it.
            recipe: its own; None where its values make none.
        """
        params = recipe_params(recipe.as_recorded().model_dump(mode="json")) if recipe else {}
        searched = {f"searched.{key}": value for key, value in trial.values.items()}
        part = self.whole.child(trial.id, params, {"trial": trial.id, **searched})
        self._parts[trial.id] = part
        part.log_steps(Past.of(self._folder.sub(trial.id)).curves())
        for report in trial.reports:
            part.log_steps([{"step": report.step, **report.metrics}])
        if trial.is_over:
            self.conclude(trial)

    def report(self, id: str, report: Report) -> None:
        """A report has come."""
        self._parts[id].log_steps(report.steps)
        if report.metrics:
            self._parts[id].log_steps([{"step": report.step, **report.metrics}])
        if report.copied:
            values = {f"searched.{key}": value for key, value in report.copied.values.items()}
            self._parts[id].tag({**values, "copied_from": report.copied.source})

    def conclude(self, trial: Trial) -> None:
        """A trial is over."""
        part = self._parts[trial.id]
        part.tag({"state": trial.state, **({"text": trial.text} if trial.text else {})})
        part.end(_STATUS[trial.state])

    def crown(
        self,
        trial: Trial,
        value: float,
        checkpoint: tuple[str, int] | None,
        model: str,
        export: LoadableModel | None,
    ) -> None:
        """Marks the best trial, and registers its state as a version of a model.

        Args:
            trial: the best one.
            value: its metric.
            checkpoint: its newest one, a URI and a step.
            model: the name of the registered model.
            export: what is made of that checkpoint; None: the checkpoint itself is registered.
        """
        values: Mapping[str, Any] = {f"best.{key}": v for key, v in trial.values.items()}
        self.whole.tag({"best_trial": trial.id, "best_value": value, **values})
        last = trial.last
        if last:
            self.whole.log_steps(
                [{"step": last.step, **{f"best/{k}": v for k, v in last.metrics.items()}}]
            )
        for id, part in self._parts.items():
            part.tag({"best": id == trial.id})
        if checkpoint:
            self.whole.tag({"best_checkpoint": checkpoint[0]})
            metrics = dict(last.metrics) if last else {}
            self._parts[trial.id].record_checkpoint(*checkpoint, metrics)
            if export:
                self._parts[trial.id].register_export(export, model)
            else:
                self._parts[trial.id].register_checkpoint(checkpoint[0], model)
