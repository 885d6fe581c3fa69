"""The trial as Ray Tune runs it: an actor that serves one trial after the other.

What takes seconds, a process with PyTorch and the engine imported, is there once for all of them.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
from ray.tune import Trainable

from elastrata.core.device import current_device
from elastrata.core.mesh import lone_group
from elastrata.sweeps.failure import failure
from elastrata.sweeps.group_trial import GroupTrial
from elastrata.sweeps.job import TrialJob
from elastrata.sweeps.lone_trial import LoneTrial
from elastrata.sweeps.report import Copied, Report
from elastrata.sweeps.schedulers import TOKENS
from elastrata_pipelines.storage import Storage

REPORT = "report"
"""The key of a result that holds the `Report`; the others are for searchers and schedulers."""
_process = ExitStack()
"""What lasts as long as the process."""


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
        trial = LoneTrial(recipe, self._run(), self._origin, told)
        if self._origin:
            self._copied = Copied(
                source=self._origin[0].url.rpartition("/")[2],
                step=trial.start.step,
                values=dict(self.config),
                metrics=trial.evaluation(),
            )
        return trial
