"""The source of a run's samples: where its stream begins, told by its newest state.

Ray Train's controller calls this for every new group of workers; it imports no torch, so that the
controller starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.data import Dataset

from elastrata.cluster.event_sender import tell
from elastrata.core.backoff import patiently
from elastrata.core.events import Warned
from elastrata.replicas.storage import Replicas
from elastrata.trainer.newest_state import newest_state
from elastrata_pipelines.batches import Start
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import descriptors


@dataclass(frozen=True, kw_only=True)
class Source:
    """Calling it gives the data set of what is left of the run's steps."""

    run: Storage
    phases: tuple[Phase, ...]
    channel: Any
    hot: Replicas | None

    def __call__(self) -> Dataset:
        """The descriptors from the newest state that is whole, in memory or on storage, to the last
        step."""
        return descriptors(self.phases, self._start())

    def _start(self) -> Start:
        return patiently(
            lambda: newest_state(self.run, self.hot, self._warn), "the newest state", self._warn
        )

    def _warn(self, line: str) -> None:
        tell(self.channel, Warned(text=line))
