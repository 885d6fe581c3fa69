"""The trial as Ray Tune runs it: an actor that serves one trial after the other.

What takes seconds, a process with PyTorch and the engine imported, is there once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Protocol

import ray
import torch.distributed as dist
from ray.tune import Callback, Trainable
from ray.tune.experiment import Trial as TuneTrial

from elastrata.cluster.node_kinds import kinds_by_node
from elastrata.core.device import current_device
from elastrata.core.mesh import lone_group
from elastrata.sweeps.group_trial import GroupTrial
from elastrata.sweeps.lone_trial import LoneTrial
from elastrata.sweeps.schedulers import TOKENS
from elastrata.sweeps.standings import (
    CONCLUDED,
    COPIED,
    REPORTED,
    Copied,
    Report,
    Standings,
    failure,
    report_entry,
)
from elastrata.sweeps.trial_recipe import TrialJob
from elastrata_pipelines.storage import Storage

REPORT = "report"
"""The key of a result that holds the `Report`; the others are for searchers and schedulers."""
_process = ExitStack()
"""Contexts that last as long as the process."""


class RunningTrial(Protocol):
    """A trial that is under way: of one worker, or of a group."""

    def report(self) -> Report:
        """Trains up to the next evaluation."""
        ...

    def close(self) -> None:
        """Ends it where it is."""
        ...


class TrialActor(Trainable):
    """Tune's side of a trial."""

    def setup(self, config: dict[str, Any], job: TrialJob) -> None:  # type: ignore[override]
        """A trial begins with its first step, when it is known where it continues from."""
        self._job = job
        self._trial: RunningTrial | None = None
        self._origin: tuple[Storage, str] | None = None
        self._copied: Copied | None = None
        self._newest: Report | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial, in the same process."""
        self.cleanup()
        return True

    def step(self) -> dict[str, Any]:
        """Trains up to the next evaluation; what goes wrong is the trial's result."""
        try:
            self._trial = self._trial or self._open()
            report = replace(self._trial.report(), copied=self._copied)
        except Exception as error:
            state, text = failure(error)
            before = self._newest or Report(step=0, samples=0, tokens=0, seconds=0.0, metrics={})
            report = replace(before, seconds=0.0, metrics={}, steps=(), state=state, text=text)
        self._newest, self._copied = report, None
        return {
            self._job.metric: math.nan,
            **report.metrics,
            TOKENS: report.tokens,
            "done": report.state != "running",
            REPORT: report,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, str]:
        """Saves the trial's state in its run, and tells Tune where it is."""
        trial = self._trial
        assert isinstance(trial, LoneTrial)
        return {"run": trial.run.uri(), "folder": trial.save()}

    def load_checkpoint(self, checkpoint: dict[str, str] | None) -> None:
        """The trial is to continue from that state, maybe that of another one."""
        assert checkpoint is not None
        run = Storage(checkpoint["run"])
        if run.uri() != self._run().uri():
            self._origin = (run, checkpoint["folder"])

    def cleanup(self) -> None:
        """Ends the trial where it is."""
        trial, self._trial = self._trial, None
        self._origin = self._copied = self._newest = None
        if trial:
            trial.close()

    def _run(self) -> Storage:
        return self._job.folder.sub(self.trial_id)

    def _open(self) -> RunningTrial:
        recipe = self._job.recipe(self.trial_id, self.config)
        told = self._job.told.get(self.trial_id, 0)
        if recipe.workers.most > 1:
            return GroupTrial(recipe, self.trial_id, told)
        if not dist.is_initialized():
            _process.enter_context(lone_group(current_device()))
        node: str = ray.get_runtime_context().get_node_id()
        kinds = kinds_by_node(recipe)([node])
        trial = LoneTrial(recipe, self._run(), self._origin, told, kinds)
        if self._origin:
            self._copied = Copied(
                source=self._origin[0].url.rpartition("/")[2],
                step=trial.start.step,
                values=dict(self.config),
                metrics=trial.evaluation(),
            )
        return trial


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
