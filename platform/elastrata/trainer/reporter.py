"""What an attempt reports: events to the driver, and on rank 0 the history on storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from elastrata.checkpoints.commit import Commit
from elastrata.run.history import HistoryWriter, unwritten_extra
from elastrata.step.evaluate import evaluation_event
from elastrata.step.events import (
    Chosen,
    Committed,
    ControlSignal,
    Evaluated,
    Event,
    Halted,
    Heard,
    Removed,
    Stalled,
    Started,
    Warned,
)
from elastrata.step.records import StepRecord
from elastrata.step.train_step import StepLoss
from elastrata_pipelines.storage import Storage


class Channel(Protocol):
    """Channel to the process that leads the run: the driver of a cluster, or the trial of a
    sweep."""

    def send(self, event: Event) -> None:
        """Send an event without blocking."""

    def look(self) -> ControlSignal | None:
        """Return the newest signal to the workers that has arrived here, without blocking."""

    def flush(self) -> None:
        """Wait until all sent events have left this process, for a minute at most."""


class Reporter:
    """Reports of one rank in one attempt. Every metric takes this way: `Trainer.train` calls
    `on_step` or `on_evaluation`, which adds a line to the history and sends an event through the
    channel; the driver's recorder logs it to MLflow.

    Args:
        run: the run's folder.
        channel: to the driver.
        attempt: number of this group of workers.
        rank: of this worker. Rank 0 alone writes the history.
    """

    def __init__(self, run: Storage, channel: Channel, *, attempt: int, rank: int) -> None:
        self._channel = channel
        self._history = HistoryWriter(run.sub("history"), attempt, self.warn) if not rank else None
        self._evaluated: Evaluated | None = None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which speaks for the group."""
        return self._history is not None

    def request(self) -> ControlSignal | None:
        """Return what the driver asks of the workers now, without blocking."""
        return self._channel.look()

    def warn(self, line: str) -> None:
        """Send a warning."""
        self._channel.send(Warned(text=line))

    def on_start(self, event: Started) -> None:
        """Report that the group is ready for its first step."""
        self._channel.send(event)
        fields = asdict(event)
        kept = ("step", "world_size", "state", "stayed", "spare_bytes", "seconds")
        self._add("started", {name: fields[name] for name in kept}, flush=True)

    def on_choice(self, event: Chosen) -> None:
        """Report the group's choice of keys that the recipe leaves open. Rank 0 sends it."""
        if self.is_first:
            self._channel.send(event)
            self._add("chosen", asdict(event))

    def on_step(self, record: StepRecord) -> None:
        """Report a finished step."""
        self._channel.send(record)
        self._add("step", record.to_dict())

    def on_evaluation(
        self, step: int, losses: Mapping[str, StepLoss], seconds: float
    ) -> Mapping[str, float]:
        """Report an evaluation after `step` steps.

        Returns:
            The evaluation's results by metric name.
        """
        self._evaluated = evaluation_event(step, losses, seconds)
        self._channel.send(self._evaluated)
        metrics = self._evaluated.to_metrics()
        self._add("evaluated", {"step": step, "seconds": seconds, **metrics})
        return metrics

    def on_target(self, record: StepRecord, metric: str, value: float) -> None:
        """Report that the evaluation after this step has reached the run's target."""
        progress = {"step": record.step, "samples": record.samples, "tokens": record.tokens}
        self._add("reached", {**progress, "metric": metric, "value": value})

    def on_request(self, signal: ControlSignal) -> None:
        """Report that the group has received a request and will act on it after the next step."""
        self._channel.send(Heard(action=signal.action))

    def on_stall(self, step: int, seconds: float) -> None:
        """Report the seconds that training waited for a save after a step."""
        self._channel.send(Stalled(step=step, seconds=seconds))

    def on_commit(self, commit: Commit, uri: str) -> None:
        """Report a complete checkpoint."""
        self._add("committed", {"step": commit.step, "commit": commit.folder}, flush=True)
        self._channel.send(
            Committed(step=commit.step, uri=uri, evaluation_loss=commit.evaluation_loss)
        )

    def before_removal(self, folders: Sequence[str]) -> None:
        """Record in the history which checkpoints will be removed.

        Raises:
            OSError: the history cannot be written.
        """
        # Before the removal: a checkpoint that is gone without a record counts as lost.
        if not self._add("removed", {"commits": list(folders)}, flush=True):
            raise OSError(
                "keeping old checkpoints, because the history cannot record their removal"
            )

    def on_removal(self, uri: str) -> None:
        """Report a removed checkpoint."""
        self._channel.send(Removed(uri=uri))

    def on_halt(self, step: int, signal: ControlSignal) -> None:
        """Report that the state of that step is safe and the group has halted. Waits until that
        has left the process."""
        halt = Halted(step=step, reason=signal.reason, text=signal.text)
        self._add("halted", asdict(halt), flush=True)
        self._channel.send(halt)
        self._channel.flush()

    def evaluation_of(self, step: int) -> Evaluated | None:
        """Return the evaluation after that step; None if there was none."""
        return self._evaluated if self._evaluated and self._evaluated.step == step else None

    def unwritten(self) -> dict[str, Any]:
        """Return the part of the history that is not yet on storage, as values of a commit, so
        that neither is ahead of the other."""
        return unwritten_extra(self._history) if self._history else {}

    def close(self) -> None:
        """Record that this rank has ended, cleanly or not."""
        self._add("closed", {}, flush=True)

    def _add(self, kind: str, values: Mapping[str, Any], *, flush: bool = False) -> bool:
        """Add to the history; returns whether a flush has succeeded."""
        if self._history is None:
            return True
        self._history.add(kind, values)
        return self._history.flush() if flush else True
