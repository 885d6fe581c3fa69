"""The schedule by which a run's state is saved, in memory and on storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from threading import Event as Flag
from types import TracebackType
from typing import Any, Protocol, Self, cast

import torch
import torch.distributed as dist

from elastrata.checkpoints.commit import EVALUATION, EVALUATION_LOSS, Commit
from elastrata.checkpoints.replicas.replicas import Replicas
from elastrata.checkpoints.replicas.store import most_per_node
from elastrata.checkpoints.retention import CheckpointConfig
from elastrata.checkpoints.save import DurableSaver, replica_saver
from elastrata.checkpoints.staging import Stager, state_bytes
from elastrata.run.history import HistoryWriter, unwritten
from elastrata.step.evaluate import evaluated
from elastrata.step.events import (
    Action,
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
from elastrata.trainer.copy_interval import CopyInterval
from elastrata_pipelines.retry import Backoff
from elastrata_pipelines.storage import Storage

_SECONDS_BETWEEN_WORDS = 20.0
"""Interval of log lines while a save is awaited; the driver would take silence for a hang."""


class Channel(Protocol):
    """Channel to the process that leads the run: the driver of a cluster, or the trial of a
    sweep."""

    def send(self, event: Event) -> None:
        """Send an event without blocking."""

    def look(self) -> ControlSignal | None:
        """Return the newest signal to the workers that has arrived here, without blocking."""

    def flush(self) -> None:
        """Wait until all sent events have left this process, for a minute at most."""


class CheckpointManager:
    """Writer of an attempt's history and state on one rank. Rank 0 also writes the history.

    On a clean exit it waits for the last checkpoint. After an exception it abandons saves that are
    not yet committed.

    Args:
        run: the run's folder.
        replicas: target of in-memory checkpoints; None for no such checkpoints.
        attempt: number of this group of workers.
        rank: of this worker.
        config: interval and retention of checkpoints.
        channel: to the driver.
        state: returns the state to save, at the time of the call.
        extra: returns further values for the commit, at the time of the call.
        on_gpu: whether the state is on a GPU.
    """

    def __init__(
        self,
        run: Storage,
        replicas: Replicas | None,
        *,
        attempt: int,
        rank: int,
        config: CheckpointConfig,
        channel: Channel,
        state: Callable[[], dict[str, Any]],
        extra: Callable[[], Mapping[str, Any]] = dict,
        on_gpu: bool = False,
    ) -> None:
        # Only rank 0 has a history; elsewhere in this class its presence marks rank 0.
        self._history = HistoryWriter(run.sub("history"), attempt, self._warn) if not rank else None
        self._checkpoints = run.sub("checkpoints")
        self._config, self._channel, self._state, self._extra = config, channel, state, extra
        self._evaluated: Evaluated | None = None
        self._serving: ControlSignal | None = None
        self._newest: Saving | None = None
        self._retry, self._is_overdue = Backoff(), False
        self._stager = Stager()
        self._durable = DurableSaver(
            self._checkpoints,
            attempt=attempt,
            stager=self._stager,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            warn=self._save_failed,
            on_commit=self._committed,
            before_removal=self._note_removal,
            on_remove=lambda commit: channel.send(
                Removed(uri=self._checkpoints.uri(commit.folder))
            ),
        )
        self._in_memory = replicas and MemoryCopies(
            replicas,
            attempt=attempt,
            config=config,
            stager=self._stager,
            adapts=on_gpu,
            warn=self._warn,
        )

    def asked(self) -> Action:
        """Return the action of all ranks after the step that is about to begin, on rank 0;
        elsewhere `Action.GO_ON`."""
        if self._history is None:
            return Action.GO_ON
        request = self._channel.look()
        is_new = request != self._serving
        self._serving = request
        # Each request is acted on once; after that, the same one is still pending in the channel.
        if request and is_new:
            self._channel.send(Heard(action=request.action))
            return request.action
        is_due = self._is_overdue or self._retry.retry_due(time.monotonic())
        return Action.SAVE if is_due and not self._durable.saving else Action.GO_ON

    def started(self, event: Started) -> None:
        """Record that the group is ready for its first step."""
        self._channel.send(event)
        if self._history:
            self._history.add(
                "started",
                {
                    "step": event.step,
                    "world_size": event.world_size,
                    "state": event.state,
                    "stayed": event.stayed,
                    "spare_bytes": event.spare_bytes,
                    "seconds": dict(event.seconds),
                },
            )
            self._history.flush()

    def chose(self, event: Chosen) -> None:
        """Record the group's choice of keys that the recipe leaves open. Rank 0 sends it."""
        if self._history:
            self._channel.send(event)
            self._history.add("chosen", asdict(event))

    def stepped(self, record: StepRecord) -> None:
        """Record a finished step."""
        self._channel.send(record)
        if self._history:
            self._history.add("step", record.to_dict())

    def evaluated(
        self, step: int, losses: Mapping[str, StepLoss], seconds: float
    ) -> Mapping[str, float]:
        """Record an evaluation after `step` steps.

        Returns:
            The evaluation's results by metric name.
        """
        self._evaluated = evaluated(step, losses, seconds)
        self._channel.send(self._evaluated)
        reported = self._evaluated.to_metrics()
        if self._history:
            self._history.add("evaluated", {"step": step, "seconds": seconds, **reported})
        return reported

    def reached(self, record: StepRecord, metric: str, value: float) -> None:
        """Record that the evaluation after this step has reached the run's target."""
        if self._history:
            progress = {"samples": record.samples, "tokens": record.tokens}
            self._history.add(
                "reached", {"step": record.step, **progress, "metric": metric, "value": value}
            )

    def keep(self, record: StepRecord, action: Action, *, is_last: bool) -> None:
        """Save the state after a step if a checkpoint is due, requested, or the last one.
        Collective."""
        self._newest = self._saving(record)
        seconds = 0.0
        if action > Action.GO_ON or is_last or record.step % self._config.every == 0:
            # The group ends after this step, so the save waits for the previous one instead of
            # being skipped.
            seconds += self._save_durably(waits=action >= Action.HALT or is_last)
        if self._in_memory:
            self._in_memory.stepped(record)
            seconds += self._copy(self._in_memory, record.step, asked=action >= Action.HALT)
        if seconds:
            self._channel.send(Stalled(step=record.step, seconds=seconds))

    def before_change(self) -> None:
        """Order later work of the GPU after the copies of the state, which is about to change."""
        self._stager.before_change()

    def continued(self, saving: Saving) -> None:
        """Save the state that the group resumed from, if no step is left to train. Collective."""
        # It may exist in memory alone so far, and the run ends here.
        self._newest = saving
        self._save_durably(waits=True)

    def halted(self, action: Action) -> ControlSignal:
        """Wait until the newest state is safe, and report the halt. Collective.

        Returns:
            The signal that requested the halt, on every rank.
        """
        self._make_safe(in_memory=action < Action.STOP)
        if self._history and self._serving and self._newest:
            halt = Halted(
                step=self._newest.step, reason=self._serving.reason, text=self._serving.text
            )
            self._history.add(
                "halted", {"step": halt.step, "reason": halt.reason, "text": halt.text}
            )
            self._history.flush()
            self._channel.send(halt)
            self._channel.flush()
        agreed: list[Any] = [self._serving]
        dist.broadcast_object_list(agreed, src=0)  # last: a rank that has it may end the process
        return cast(ControlSignal, agreed[0])

    def leave(self) -> None:
        """Give up the newest state, as no group will resume from it."""
        self._newest = None

    def _make_safe(self, *, in_memory: bool) -> None:
        """Wait until the newest state is on storage, and save again if that fails; or until it is
        in memory, if `in_memory` permits that. Collective."""
        while self._newest:
            self._wait_for(self._durable)
            if self._in_memory:
                self._wait_for(self._in_memory.saver)
            if self._durable.all_saved(self._newest.step):
                return
            copies = self._in_memory if in_memory else None
            if copies and copies.saver.all_saved(self._newest.step):
                return
            # Only rank 0 knows the retry delay; the others wait for it at the barrier.
            if self._history:
                Flag().wait(self._retry.seconds)
            dist.barrier()
            self._save_durably(waits=True)

    def _wait_for(self, saver: DurableSaver) -> None:
        while not saver.wait(_SECONDS_BETWEEN_WORDS):
            self._warn("the state is still being saved")

    def _saving(self, record: StepRecord) -> Saving:
        extra: dict[str, Any] = {"world_size": record.world_size, "loss": record.loss}
        extra |= self._extra()
        # An older evaluation says nothing about this state, and `keep_best` compares by it.
        if self._evaluated and self._evaluated.step == record.step:
            extra[EVALUATION_LOSS] = self._evaluated.loss
            extra[EVALUATION] = self._evaluated.to_metrics()
        return Saving(step=record.step, samples=record.samples, tokens=record.tokens, extra=extra)

    def _save_durably(self, *, waits: bool) -> float:
        """Save to storage, or postpone that if the previous save is not complete and `waits` is
        false. Returns the seconds that this took."""
        # `waits` is equal on all ranks, so either all of them or none reach the collective.
        self._is_overdue = not waits and not self._durable.all_idle()
        if self._is_overdue:
            return 0.0
        self._wait_for(self._durable)
        return self._save(self._durable)

    def _copy(self, copies: MemoryCopies, step: int, *, asked: bool) -> float:
        """Copy into memory if a copy is due or `asked` for, and there is room. Returns seconds."""
        # The same on all ranks, so that all or none reach the collectives behind it.
        if (asked or copies.is_due(step)) and copies.has_room(self._state):
            return copies.copy(step, self._save)
        return 0.0

    def _save(self, saver: DurableSaver) -> float:
        assert self._newest is not None
        extra = dict(self._newest.extra)
        # The commit carries the part of the history that is not yet on storage, so that neither is
        # ahead of the other.
        if self._history:
            extra |= unwritten(self._history)
        return saver.save(
            self._state(),
            step=self._newest.step,
            samples=self._newest.samples,
            tokens=self._newest.tokens,
            extra=extra,
        )

    def _warn(self, line: str) -> None:
        self._channel.send(Warned(text=line))

    def _save_failed(self, line: str) -> None:
        self._warn(line)
        self._retry = self._retry.failed(time.monotonic())

    def _committed(self, commit: Commit) -> None:
        self._retry = Backoff()
        if self._history:
            self._history.add("committed", {"step": commit.step, "commit": commit.folder})
            self._history.flush()
        uri = self._checkpoints.uri(commit.folder)
        self._channel.send(
            Committed(step=commit.step, uri=uri, evaluation_loss=commit.evaluation_loss)
        )

    def _note_removal(self, folders: Sequence[str]) -> None:
        """Record in the history which checkpoints will be removed."""
        # Before the removal: a checkpoint that is gone without a record counts as lost.
        if self._history:
            self._history.add("removed", {"commits": list(folders)})
            if not self._history.flush():
                raise OSError("old checkpoints stay, as the history cannot take that they go")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error other ranks may be gone, and a collective save would hang.
        if error is None:
            self._make_safe(in_memory=False)
            self._durable.close()
            if self._in_memory:
                self._in_memory.saver.close()
        if self._history:
            self._history.add("closed", {})
            self._history.flush()


_SECONDS_FOR_A_COPY = 5.0
"""How long an in-memory checkpoint waits for the previous one, once; after that, steps continue
without copies."""


class MemoryCopies:
    """In-memory checkpoints on one rank. All methods but `stepped` are collective.

    Args:
        replicas: target of the copies.
        attempt: number of this group of workers.
        config: interval, and limit of bytes on a node.
        stager: the stager of the state's savers.
        adapts: whether copies may be more frequent than in `config` if they are cheap. True on
            GPUs, because the CPU has time for them.
        warn: called with one line if a copy has failed or none is possible.
    """

    def __init__(
        self,
        replicas: Replicas,
        *,
        attempt: int,
        config: CheckpointConfig,
        stager: Stager,
        adapts: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.saver: DurableSaver = replica_saver(
            replicas, attempt=attempt, warn=warn, stager=stager
        )
        self._replicas, self._limit_bytes, self._warn = replicas, config.hot_bytes, warn
        self._interval = CopyInterval(config.hot_every) if adapts else None
        self._every, self._next = config.hot_every, 0
        self._has_room: bool | None = None
        self._is_stuck = False
        self._was_saving = False

    def stepped(self, record: StepRecord) -> None:
        """Add the time of a finished step."""
        if self._interval:
            self._interval.stepped(record.seconds, beside=self._was_saving)
        self._was_saving = self.saver.saving

    def is_due(self, step: int) -> bool:
        """Return whether a copy is due after that step."""
        # Until the first copy its cost is unknown, so the interval of the recipe applies.
        if self._interval is None or not self._next:
            return step % self._every == 0
        return step >= self._next

    def has_room(self, state: Callable[[], dict[str, Any]]) -> bool:
        """Return whether copies of such a state fit into memory; warns once if they do not."""
        # Decided once: the size of the state is the same for the whole attempt.
        if self._has_room is None:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (self._replicas.node, state_bytes(state())))
            needed = most_per_node(parts)
            self._has_room = needed <= self._limit_bytes
            if not self._has_room and dist.get_rank() == 0:
                self._warn(
                    f"checkpoint.hot_bytes: {self._limit_bytes}: no copies in memory are made, as "
                    f"a node would need {needed}; a lost worker costs the steps since the last "
                    "checkpoint"
                )
        return self._has_room

    def copy(self, step: int, save: Callable[[DurableSaver], float]) -> float:
        """Copy into memory, unless the previous copy is stuck, e.g. because its store is gone.

        Args:
            step: the last finished step.
            save: starts the save and returns the seconds that this took.

        Returns:
            Seconds that the training waited.
        """
        started = time.perf_counter()
        # A stuck copy is waited for once; otherwise every due copy would stop the steps for 5 s.
        self.saver.wait(0.0 if self._is_stuck else _SECONDS_FOR_A_COPY)
        self._is_stuck = not self.saver.all_idle()
        every = self._agree_on_interval()
        waited = time.perf_counter() - started
        self._next = step + every
        if self._is_stuck:
            return waited
        waited += save(self.saver)
        if self._interval:
            self._interval.copied(waited)
            self._was_saving = True
        return waited

    def _agree_on_interval(self) -> int:
        """Return the longest interval that any rank wants. Collective."""
        if self._interval is None:
            return self._every
        # The longest interval, because every rank takes part in a copy and one may find it
        # expensive.
        wanted = torch.tensor(self._interval.wanted, dtype=torch.int32)
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        return int(wanted.item())


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Progress and further values that a commit stores with the state."""

    step: int
    samples: int
    tokens: int
    extra: Mapping[str, Any]
