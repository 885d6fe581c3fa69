"""The keeper of a run while it trains: history, copies of the state, and word to the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import torch.distributed as dist

from elastrata.checkpoints.checkpoint import CheckpointConfig, DurableSaver, hot_saver
from elastrata.checkpoints.commit import EVALUATION_LOSS, Commit
from elastrata.hot.storage import HotStorage
from elastrata.runs.history import HistoryWriter
from elastrata.training.record import StepRecord
from elastrata.training.request import Act, Request
from elastrata.training.step import StepLoss
from elastrata.workers.backoff import Backoff
from elastrata.workers.events import Committed, Evaluated, Halted, Removed, Stalled, Started, Warned
from elastrata.workers.mailbox import Sender
from elastrata_pipelines.storage import Storage

HISTORY_PART, HISTORY_LINES = "history_part", "history_lines"
"""Keys of a hot commit's `extra`: the history that was on no storage yet when it was taken."""


class Keeper:
    """One attempt's writer of history and state. Every rank has one; rank 0's does more.

    On a clean end it waits for the last checkpoint; after an exception it leaves what is not yet
    committed behind.

    Args:
        run: the run's folder.
        hot: where copies in memory go; None: nowhere.
        attempt: number of this group of workers.
        rank: of this worker.
        config: which checkpoints are taken and stay.
        steps: of the whole run.
        sender: to the driver.
        state: what there is to save, as it is when this is called.
    """

    def __init__(
        self,
        run: Storage,
        hot: HotStorage | None,
        *,
        attempt: int,
        rank: int,
        config: CheckpointConfig,
        steps: int,
        sender: Sender,
        state: Callable[[], dict[str, Any]],
    ) -> None:
        self._history = HistoryWriter(run.sub("history"), attempt, self._warn) if not rank else None
        self._checkpoints = run.sub("checkpoints")
        self._config, self._steps = config, steps
        self._sender, self._state = sender, state
        self._evaluated: Evaluated | None = None
        self._serving: Request | None = None
        self._retry = Backoff()
        self._durable = DurableSaver(
            self._checkpoints,
            attempt=attempt,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            warn=self._failed,
            on_commit=self._committed,
            on_remove=lambda commit: sender.send(Removed(uri=self._checkpoints.uri(commit.folder))),
        )
        self._hot = hot_saver(hot, attempt=attempt, warn=self._warn) if hot else None

    def asked(self) -> Act:
        """What all ranks are to do after the step that is about to begin; on rank 0."""
        if self._history is None:
            return Act.GO_ON
        request = self._sender.request  # it may change any moment: looked at once
        is_new = request != self._serving
        self._serving = request
        if request and is_new:
            return request.act
        again = self._retry.retry_due(time.monotonic()) and not self._durable.saving
        return Act.SAVE if again else Act.GO_ON

    def started(self, event: Started) -> None:
        """The group is ready for its first step."""
        self._sender.send(event)
        if self._history:
            self._history.add(
                "started",
                {
                    "step": event.step,
                    "world_size": event.world_size,
                    "state": event.state,
                    "seconds": dict(event.seconds),
                },
            )
            if event.rolled_back:
                steps = {"first": event.step + 1, "last": event.step + event.rolled_back}
                self._history.add("rolled_back", steps)
            self._history.flush()

    def stepped(self, record: StepRecord) -> None:
        """A step is done."""
        self._sender.send(record)
        if self._history:
            self._history.add("step", record.to_dict())

    def evaluated(self, record: StepRecord, loss: StepLoss, seconds: float) -> None:
        """The held-out data was evaluated after that step."""
        metrics = {**{f"{term}_loss": v for term, v in loss.terms.items()}, **loss.metrics}
        self._evaluated = Evaluated(
            step=record.step, loss=loss.total, metrics=metrics, seconds=seconds
        )
        self._sender.send(self._evaluated)
        if self._history:
            self._history.add("evaluated", {"step": record.step, **self._evaluated.to_metrics()})

    def keep(self, record: StepRecord, act: Act) -> None:
        """Copies the state after that step where a copy is due. Collective."""
        seconds = 0.0
        if act > Act.GO_ON or due(record.step, self._config.every, self._steps):
            seconds += self._save_durably(record)
        if self._hot and (act >= Act.HALT or record.step % self._config.hot_every == 0):
            seconds += self._save_hot(record)
        if seconds:
            self._sender.send(Stalled(step=record.step, seconds=seconds))

    def halted(self, record: StepRecord) -> Request:
        """Waits until the state after that step is safe, and says so. Collective.

        Returns:
            What was asked, on every rank.
        """
        self._durable.wait()
        if self._hot:
            self._hot.wait()
        agreed: list[Any] = [self._serving]
        dist.broadcast_object_list(agreed, src=0)
        request = cast(Request, agreed[0])
        event = Halted(step=record.step, reason=request.reason, text=request.text)
        if self._history:
            self._history.add(
                "halted", {"step": event.step, "reason": event.reason, "text": event.text}
            )
            self._history.flush()
        self._sender.send(event)
        self._sender.flush()
        return request

    def _save_durably(self, record: StepRecord) -> float:
        if self._history:
            self._history.flush()
        return self._save(self._durable, record, {})

    def _save_hot(self, record: StepRecord) -> float:
        if self._history is None or not self._history.pending:
            return self._save(self._hot, record, {})
        unwritten = {
            HISTORY_PART: self._history.part_name,
            HISTORY_LINES: self._history.pending.decode(),
        }
        return self._save(self._hot, record, unwritten)

    def _save(
        self, saver: DurableSaver | None, record: StepRecord, unwritten: dict[str, Any]
    ) -> float:
        assert saver is not None
        extra = {"world_size": record.world_size, "loss": record.loss, **unwritten}
        if self._evaluated and self._evaluated.step == record.step:
            extra[EVALUATION_LOSS] = self._evaluated.loss
        return saver.save(
            self._state(),
            step=record.step,
            samples=record.samples,
            tokens=record.tokens,
            extra=extra,
        )

    def _warn(self, line: str) -> None:
        self._sender.send(Warned(text=line))

    def _failed(self, line: str) -> None:
        self._warn(line)
        self._retry = self._retry.failed(time.monotonic())

    def _committed(self, commit: Commit) -> None:
        self._retry = self._retry.succeeded()
        uri = self._checkpoints.uri(commit.folder)
        self._sender.send(
            Committed(step=commit.step, uri=uri, evaluation_loss=commit.evaluation_loss)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._durable.close()
            if self._hot:
                self._hot.close()
        if self._history:
            self._history.flush()


def due(step: int, every: int, steps: int) -> bool:
    """Whether something that happens `every` so many steps, and after the last, happens now."""
    return step % every == 0 or step == steps
