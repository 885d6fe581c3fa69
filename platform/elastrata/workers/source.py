"""The source of a run's samples: where its stream begins, told by its newest state.

Ray Train's controller calls this for every new group of workers; it imports no torch, so that the
controller starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.data import Dataset

from elastrata.checkpoints.commit import Commit, commits, newest_verified
from elastrata.hot.storage import HotStorage, newest_hot
from elastrata.workers.events import Warned
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
    hot: HotStorage | None

    def __call__(self) -> Dataset:
        """The descriptors from the newest state that is whole, in memory or on storage, to the last
        step."""
        return descriptors(
            self.batches, self._start(), steps=self.steps, batch_size=self.batch_size
        )

    def _start(self) -> Start:
        saved = commits(self.run.sub("checkpoints"))
        hot = newest_hot(self.hot) if self.hot else None
        if hot and (not saved or hot.place >= saved[0].place):
            return _start(hot, "hot")
        durable = newest_verified(self.run.sub("checkpoints"), self._warn)
        return _start(durable, "durable") if durable else Start()

    def _warn(self, line: str) -> None:
        self.mailbox.post.remote([Warned(text=line)])


def _start(commit: Commit, tier: str) -> Start:
    return Start(
        step=commit.step,
        samples=commit.samples,
        tokens=commit.tokens,
        commit=commit.folder,
        tier=tier,
    )
