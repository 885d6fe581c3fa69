"""The source of a run's samples: a stream that begins at the newest state.

Ray Train's controller calls this for every new group of workers.
"""

# This module imports no torch, so that Ray Train's controller starts fast.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.data import Dataset

from elastrata.checkpoints.replicas.replicas import Replicas
from elastrata.cluster.channel import send_event
from elastrata.cluster.ray_train_internals import WorkerGroupCallback
from elastrata.step.events import Warned
from elastrata.trainer.resume import ResumePoint, find_resume_point
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.retry import retry_storage_action
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import descriptors

_resume_point: ResumePoint | None = None
"""In a worker: the state that its group resumes from."""


class Source(WorkerGroupCallback):
    """Finds the newest state before each new group of workers starts.

    The stream begins at that state, and every worker receives it to restore from.

    Args:
        run: the run's folder.
        phases: phases of the run.
        channel: handle of the control channel.
        replicas: store of the in-memory checkpoints; None if they are off.
        max_steps: most steps that are read together; None for any number.
    """

    def __init__(
        self,
        run: Storage,
        phases: Sequence[Phase],
        *,
        channel: Any,
        replicas: Replicas | None,
        max_steps: int | None = None,
    ) -> None:
        self._max_steps = max_steps
        self._run, self._phases, self._channel, self._replicas = run, phases, channel, replicas
        self._newest: ResumePoint | None = None

    def __call__(self) -> Dataset:
        """Return the descriptors from the newest intact state, in memory or on storage, to the last
        step. Ray Train calls it before `after_worker_group_start`."""
        self._newest = retry_storage_action(
            lambda: find_resume_point(self._run, self._replicas, self._warn),
            "the newest state",
            self._warn,
        )
        return descriptors(self._phases, self._newest.start, max_steps=self._max_steps)

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Send the resume point to every worker before it trains."""
        assert self._newest is not None, "no stream was opened for this group"
        worker_group.execute(_set_resume_point, self._newest)

    def _warn(self, line: str) -> None:
        send_event(self._channel, Warned(text=line))


def get_resume_point() -> ResumePoint:
    """In a training worker: return the state that its group resumes from."""
    assert _resume_point is not None
    return _resume_point


def _set_resume_point(newest: ResumePoint) -> None:
    global _resume_point
    _resume_point = newest
