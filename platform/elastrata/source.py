"""The source of a run's samples: where its stream begins, told by its newest checkpoint.

Ray Train's controller calls this for every new group of workers; it imports no torch, so that the
controller starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.data import Dataset

from elastrata.commit import newest_verified
from elastrata.events import Warned
from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import descriptors


@dataclass(frozen=True, kw_only=True)
class Source:
    """Calling it gives the data set of what is left of the run's steps."""

    run: Storage
    batches: Batches
    steps: int
    batch_size: int
    mailbox: Any

    def __call__(self) -> Dataset:
        """The descriptors from the newest checkpoint that is whole to the last step."""
        return descriptors(
            self.batches, self._start(), steps=self.steps, batch_size=self.batch_size
        )

    def _start(self) -> Start:
        commit = newest_verified(self.run.sub("checkpoints"), self._warn)
        if commit is None:
            return Start()
        return Start(
            step=commit.step, samples=commit.samples, tokens=commit.tokens, commit=commit.folder
        )

    def _warn(self, line: str) -> None:
        self.mailbox.post.remote([Warned(text=line)])
