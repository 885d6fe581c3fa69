"""The keeper of a run while it trains: history, checkpoints, and word to the driver."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import nn

from elastrata.checkpoint import CheckpointConfig, DurableSaver
from elastrata.commit import EVALUATION_LOSS, Commit
from elastrata.events import Committed, Evaluated, Removed, Stalled, Started, Warned
from elastrata.history import HistoryWriter
from elastrata.mailbox import Sender
from elastrata.record import StepRecord
from elastrata.step import StepLoss
from elastrata.training_state import training_state
from elastrata_pipelines.storage import Storage


class Keeper:
    """One attempt's writer of history and checkpoints. Every rank has one; rank 0's does more.

    On a clean end it waits for the last checkpoint; after an exception it leaves what is not yet
    committed behind.

    Args:
        run: the run's folder.
        attempt: number of this group of workers.
        rank: of this worker.
        checkpoint: which checkpoints stay.
        sender: to the driver.
        model: as `parallelize` returned it.
        optimizer: over its parameters.
    """

    def __init__(
        self,
        run: Storage,
        *,
        attempt: int,
        rank: int,
        checkpoint: CheckpointConfig,
        sender: Sender,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        def warn(line: str) -> None:
            sender.send(Warned(text=line))

        self._history = HistoryWriter(run.sub("history"), attempt, warn) if rank == 0 else None
        self._checkpoints = run.sub("checkpoints")
        self._sender, self._model, self._optimizer = sender, model, optimizer
        self._evaluated: Evaluated | None = None
        self._saver = DurableSaver(
            self._checkpoints,
            keep_last=checkpoint.keep_last,
            keep_best=checkpoint.keep_best,
            warn=warn,
            on_commit=self._committed,
            on_remove=lambda commit: sender.send(Removed(uri=self._checkpoints.uri(commit.folder))),
        )

    def started(self, event: Started) -> None:
        """The group is ready for its first step."""
        self._sender.send(event)
        if self._history:
            self._history.add("started", {"step": event.step, "world_size": event.world_size})
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

    def save(self, record: StepRecord) -> None:
        """Takes a checkpoint of the state after that step. Collective."""
        if self._history:
            self._history.flush()
        extra: dict[str, float] = {"world_size": record.world_size, "loss": record.loss}
        if self._evaluated and self._evaluated.step == record.step:
            extra[EVALUATION_LOSS] = self._evaluated.loss
        seconds = self._saver.save(
            training_state(self._model, self._optimizer),
            step=record.step,
            samples=record.samples,
            tokens=record.tokens,
            extra=extra,
        )
        self._sender.send(Stalled(step=record.step, seconds=seconds))

    def _committed(self, commit: Commit) -> None:
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
            self._saver.close()
        if self._history:
            self._history.flush()
