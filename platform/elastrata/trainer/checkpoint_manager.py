"""When the state of a run is saved, in memory and on storage."""

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
"""Who waits for a save says so this often; silence would be taken for a hang."""


class Channel(Protocol):
    """To and from whoever leads the run: the driver of a cluster, or the trial of a sweep."""

    def send(self, event: Event) -> None:
        """Sends an event; waits for nothing."""

    def look(self) -> ControlSignal | None:
        """The signal to the workers, as far as it is known here; waits for nothing."""

    def flush(self) -> None:
        """Waits until what was sent has left this process; a minute at most."""


class CheckpointManager:
    """One attempt's writer of history and state. Every rank has one; rank 0's does more.

    On a clean end it waits for the last checkpoint; after an exception it leaves what is not yet
    committed behind.

    Args:
        run: the run's folder.
        replicas: where copies in memory go; None: nowhere.
        attempt: number of this group of workers.
        rank: of this worker.
        config: which checkpoints are taken and stay.
        channel: to the driver.
        state: what there is to save, as it is when this is called.
        extra: more that a commit is to say, as it is when this is called.
        on_gpu: whether the state is on one.
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
        self._history = HistoryWriter(run.sub("history"), attempt, self._warn) if not rank else None
        self._checkpoints = run.sub("checkpoints")
        self._config, self._channel, self._state, self._extra = config, channel, state, extra
        self._evaluated: Evaluated | None = None
        self._serving: ControlSignal | None = None
        self._newest: Saving | None = None
        self._retry, self._overdue = Backoff(), False
        self._stager = Stager()
        self._durable = DurableSaver(
            self._checkpoints,
            attempt=attempt,
            stager=self._stager,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            warn=self._failed,
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
        """The action of all ranks after the step that is about to begin; on rank 0."""
        if self._history is None:
            return Action.GO_ON
        request = self._channel.look()
        is_new = request != self._serving
        self._serving = request
        if request and is_new:
            self._channel.send(Heard(action=request.action))
            return request.action
        is_due = self._overdue or self._retry.retry_due(time.monotonic())
        return Action.SAVE if is_due and not self._durable.saving else Action.GO_ON

    def started(self, event: Started) -> None:
        """The group is ready for its first step."""
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
        """The group has chosen what the recipe leaves open. Rank 0 says so."""
        if self._history:
            self._channel.send(event)
            self._history.add("chosen", asdict(event))

    def stepped(self, record: StepRecord) -> None:
        """A step is done."""
        self._channel.send(record)
        if self._history:
            self._history.add("step", record.to_dict())

    def evaluated(
        self, step: int, losses: Mapping[str, StepLoss], seconds: float
    ) -> Mapping[str, float]:
        """The held-out data was evaluated after so many steps.

        Returns:
            What the evaluation reports, by metric name.
        """
        self._evaluated = evaluated(step, losses, seconds)
        self._channel.send(self._evaluated)
        reported = self._evaluated.to_metrics()
        if self._history:
            self._history.add("evaluated", {"step": step, "seconds": seconds, **reported})
        return reported

    def reached(self, record: StepRecord, metric: str, value: float) -> None:
        """The evaluation after that step has reached the run's target."""
        if self._history:
            progress = {"samples": record.samples, "tokens": record.tokens}
            self._history.add(
                "reached", {"step": record.step, **progress, "metric": metric, "value": value}
            )

    def keep(self, record: StepRecord, action: Action, *, is_last: bool) -> None:
        """Copies the state after that step where a copy is due, as after the last. Collective."""
        self._newest = self._saving(record)
        seconds = 0.0
        if action > Action.GO_ON or is_last or record.step % self._config.every == 0:
            seconds += self._save_durably(waits=action >= Action.HALT or is_last)
        if self._in_memory:
            self._in_memory.stepped(record)
            seconds += self._copy(self._in_memory, record.step, asked=action >= Action.HALT)
        if seconds:
            self._channel.send(Stalled(step=record.step, seconds=seconds))

    def before_change(self) -> None:
        """The state is about to change: what the GPU does from here on comes after its copies."""
        self._stager.before_change()

    def continued(self, saving: Saving) -> None:
        """The group continued from that state in memory, and no step is left: it is the last one
        that there will be to save. Collective."""
        self._newest = saving
        self._save_durably(waits=True)

    def halted(self, action: Action) -> ControlSignal:
        """Waits until the newest state is safe, and says so. Collective.

        Returns:
            What was asked, on every rank.
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
        dist.broadcast_object_list(agreed, src=0)  # last: who has it may end
        return cast(ControlSignal, agreed[0])

    def leave(self) -> None:
        """Nobody will go on from here: what is not saved by now need not be."""
        self._newest = None

    def _make_safe(self, *, in_memory: bool) -> None:
        """Returns when the newest state is on storage, and takes it again where that fails; or, if
        that is enough, when it is in memory. Collective."""
        while self._newest:
            self._await(self._durable)
            if self._in_memory:
                self._await(self._in_memory.saver)
            if self._durable.all_saved(self._newest.step):
                return
            copies = self._in_memory if in_memory else None
            if copies and copies.saver.all_saved(self._newest.step):
                return
            if self._history:
                Flag().wait(self._retry.seconds)
            dist.barrier()
            self._save_durably(waits=True)

    def _await(self, saver: DurableSaver) -> None:
        while not saver.wait(_SECONDS_BETWEEN_WORDS):
            self._warn("the state is still being saved")

    def _saving(self, record: StepRecord) -> Saving:
        extra: dict[str, Any] = {"world_size": record.world_size, "loss": record.loss}
        extra |= self._extra()
        if self._evaluated and self._evaluated.step == record.step:
            extra[EVALUATION_LOSS] = self._evaluated.loss
            extra[EVALUATION] = self._evaluated.to_metrics()
        return Saving(step=record.step, samples=record.samples, tokens=record.tokens, extra=extra)

    def _save_durably(self, *, waits: bool) -> float:
        """Saves to storage; where the save before is not complete, later, unless it is to wait."""
        self._overdue = not waits and not self._durable.all_idle()
        if self._overdue:
            return 0.0
        self._await(self._durable)
        return self._save(self._durable)

    def _copy(self, copies: MemoryCopies, step: int, *, asked: bool) -> float:
        """Copies into memory where that is due, or asked for, and there is room."""
        if (asked or copies.is_due(step)) and copies.has_room(self._state):
            return copies.copy(step, self._save)
        return 0.0

    def _save(self, saver: DurableSaver) -> float:
        assert self._newest is not None
        extra = dict(self._newest.extra)
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

    def _failed(self, line: str) -> None:
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
        """Notes which checkpoints are to go, before they do: one that is gone without a note is
        missing."""
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
        if error is None:
            self._make_safe(in_memory=False)
            self._durable.close()
            if self._in_memory:
                self._in_memory.saver.close()
        if self._history:
            self._history.add("closed", {})
            self._history.flush()


_SECONDS_FOR_A_COPY = 5.0
"""How long a copy in memory waits for the one before, once: then steps go on without."""


class MemoryCopies:
    """One rank's part in them. All its methods but `stepped` are collective.

    Args:
        replicas: where the copies go.
        attempt: number of this group of workers.
        config: how often, and how many bytes on a node.
        stager: of the state's savers.
        adapts: whether they may come more often than `config` has it, where they cost little: on
            GPUs, beside which the processor has time for them.
        warn: called with one line when a copy has failed, or none can be made.
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
        """A step is done."""
        if self._interval:
            self._interval.stepped(record.seconds, beside=self._was_saving)
        self._was_saving = self.saver.saving

    def is_due(self, step: int) -> bool:
        """Whether a copy is to be made after that step."""
        if self._interval is None or not self._next:
            return step % self._every == 0
        return step >= self._next

    def has_room(self, state: Callable[[], dict[str, Any]]) -> bool:
        """Whether the copies of such a state fit at all; where they never can, says so once."""
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
        """Copies into memory; not now where the copy before is stuck, as its store may be gone.

        Args:
            step: that is done.
            save: begins to, and returns the seconds that this took.

        Returns:
            Seconds that the training waited.
        """
        started = time.perf_counter()
        self.saver.wait(0.0 if self._is_stuck else _SECONDS_FOR_A_COPY)
        self._is_stuck = not self.saver.all_idle()
        every = self._agreed_interval()
        waited = time.perf_counter() - started
        self._next = step + every
        if self._is_stuck:
            return waited
        waited += save(self.saver)
        if self._interval:
            self._interval.copied(waited)
            self._was_saving = True
        return waited

    def _agreed_interval(self) -> int:
        """The longest that any rank wants."""
        if self._interval is None:
            return self._every
        wanted = torch.tensor(self._interval.wanted, dtype=torch.int32)
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        return int(wanted.item())


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The progress, and more values, that a commit keeps beside the state."""

    step: int
    samples: int
    tokens: int
    extra: Mapping[str, Any]
