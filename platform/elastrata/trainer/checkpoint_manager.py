"""The schedule by which a run's state is saved, in memory and on storage."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from threading import Event as Flag
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist

from elastrata.checkpoints.commit import EVALUATION, EVALUATION_LOSS, Commit
from elastrata.checkpoints.replicas.replicas import Replicas
from elastrata.checkpoints.replicas.store import most_per_node
from elastrata.checkpoints.retention import CheckpointConfig
from elastrata.checkpoints.save import DurableSaver, replica_saver
from elastrata.checkpoints.staging import Stager, state_bytes
from elastrata.step.events import Action, ControlSignal
from elastrata.step.records import StepRecord
from elastrata.trainer.reporter import Reporter
from elastrata_pipelines.retry import Backoff
from elastrata_pipelines.storage import Storage

_SECONDS_BETWEEN_WORDS = 20.0
"""Interval of log lines while a save is awaited; the driver would take silence for a hang."""
_FULL_DISK_TRIES = 2
"""Failed saves on a full disk after which a run that was asked to stop ends without its state."""


class CheckpointManager:
    """Writer of an attempt's state on one rank.

    On a clean exit it waits for the last checkpoint. After an exception it abandons saves that are
    not yet committed.

    Args:
        run: the run's folder.
        replicas: target of in-memory checkpoints; None for no such checkpoints.
        reporter: of this rank.
        attempt: number of this group of workers.
        config: interval and retention of checkpoints.
        state: returns the state to save, at the time of the call.
        extra: returns further values for the commit, at the time of the call.
        on_gpu: whether the state is on a GPU.
    """

    def __init__(
        self,
        run: Storage,
        replicas: Replicas | None,
        reporter: Reporter,
        *,
        attempt: int,
        config: CheckpointConfig,
        state: Callable[[], dict[str, Any]],
        extra: Callable[[], Mapping[str, Any]] = dict,
        on_gpu: bool = False,
    ) -> None:
        self._reporter, self._checkpoints = reporter, run.sub("checkpoints")
        self._config, self._state, self._extra = config, state, extra
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
            keep_every=config.keep_every,
            keep_steps=config.keep_steps,
            warn=self._save_failed,
            on_commit=self._committed,
            before_removal=reporter.before_removal,
            on_remove=lambda commit: reporter.on_removal(self._checkpoints.uri(commit.folder)),
        )
        self._in_memory = replicas and MemoryCopies(
            replicas,
            attempt=attempt,
            config=config,
            stager=self._stager,
            adapts=on_gpu,
            warn=reporter.warn,
        )

    def requested_action(self) -> Action:
        """Return the action of all ranks after the step that is about to begin, on rank 0;
        elsewhere `Action.GO_ON`."""
        if not self._reporter.is_first:
            return Action.GO_ON
        request = self._reporter.request()
        is_new = request != self._serving
        self._serving = request
        # Each request is acted on once; after that, the same one is still pending in the channel.
        if request and is_new:
            self._reporter.on_request(request)
            return request.action
        is_due = self._is_overdue or self._retry.is_retry_due(time.monotonic())
        return Action.SAVE if is_due and not self._durable.saving else Action.GO_ON

    def save(self, record: StepRecord, action: Action, *, is_last: bool) -> None:
        """Save the state after a step if a checkpoint is due, requested, or the last one.
        Collective."""
        self._newest = self._saving(record)
        seconds = 0.0
        if action > Action.GO_ON or is_last or record.step % self._config.every == 0:
            # The group ends after this step, so the save waits for the previous one instead of
            # being skipped.
            seconds += self._save_durably(waits=action >= Action.HALT or is_last)
        if self._in_memory:
            self._in_memory.add_step(record)
            seconds += self._copy(self._in_memory, record.step, asked=action >= Action.HALT)
        if seconds:
            self._reporter.on_stall(record.step, seconds)

    def before_change(self) -> None:
        """Order later work of the GPU after the copies of the state, which is about to change."""
        self._stager.before_change()

    def save_resumed(self, saving: Saving) -> None:
        """Save the state that the group resumed from, if no step is left to train. Collective."""
        # It may exist in memory alone so far, and the run ends here.
        self._newest = saving
        self._save_durably(waits=True)

    def halt(self, action: Action) -> ControlSignal:
        """Wait until the newest state is safe, and report the halt. Collective.

        Returns:
            The signal that requested the halt, on every rank.
        """
        is_safe = self._make_safe(in_memory=action < Action.STOP, is_stop=action >= Action.STOP)
        if self._reporter.is_first and self._serving and self._newest and is_safe:
            self._reporter.on_halt(self._newest.step, self._serving)
        agreed: list[Any] = [self._serving]
        dist.broadcast_object_list(agreed, src=0)  # last: a rank that has it may end the process
        return cast(ControlSignal, agreed[0])

    def leave(self) -> None:
        """Give up the newest state, as no group will resume from it."""
        self._newest = None

    def _make_safe(self, *, in_memory: bool, is_stop: bool = False) -> bool:
        """Wait until the newest state is on storage, and save again if that fails; or until it is
        in memory, if `in_memory` permits that. Collective.

        Returns:
            False if the run was asked to stop and the disk remains full.
        """
        while self._newest:
            self._wait_for(self._durable)
            if self._in_memory:
                self._wait_for(self._in_memory.saver)
            if self._durable.all_saved(self._newest.step):
                return True
            copies = self._in_memory if in_memory else None
            if copies and copies.saver.all_saved(self._newest.step):
                return True
            if not self._wait_to_retry(is_stop):
                return False
            self._save_durably(waits=True)
        return True

    def _wait_to_retry(self, is_stop: bool) -> bool:
        """Wait until it is time to repeat a failed save. Collective.

        Returns:
            False if the save is not to be repeated: the user, who waits for the end of the run,
            cannot make room on the disk meanwhile.
        """
        repeats = torch.ones((), dtype=torch.int32)
        # Only rank 0 knows the cause and the delay.
        if self._reporter.is_first:
            if is_stop and self._durable.is_disk_full and self._retry.failures >= _FULL_DISK_TRIES:
                repeats.zero_()
                self._reporter.warn(
                    "the run ends without its newest state; the same command redoes the steps "
                    "after the last checkpoint"
                )
            else:
                Flag().wait(self._retry.seconds)
        dist.broadcast(repeats, src=0)
        return bool(repeats.item())

    def _wait_for(self, saver: DurableSaver) -> None:
        while not saver.wait(_SECONDS_BETWEEN_WORDS):
            self._reporter.warn("the state is still being saved")

    def _saving(self, record: StepRecord) -> Saving:
        extra: dict[str, Any] = {"world_size": record.world_size, "loss": record.loss}
        extra |= self._extra()
        # An older evaluation says nothing about this state, and `keep_best` compares by it.
        if evaluation := self._reporter.evaluation_of(record.step):
            extra[EVALUATION_LOSS] = evaluation.loss
            extra[EVALUATION] = evaluation.to_metrics()
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
        return saver.save(
            self._state(),
            step=self._newest.step,
            samples=self._newest.samples,
            tokens=self._newest.tokens,
            extra={**self._newest.extra, **self._reporter.unwritten()},
        )

    def _save_failed(self, line: str) -> None:
        self._reporter.warn(line)
        self._retry = self._retry.after_failure(time.monotonic())

    def _committed(self, commit: Commit) -> None:
        self._retry = Backoff()
        self._reporter.on_commit(commit, self._checkpoints.uri(commit.folder))

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
        self._reporter.close()


_SECONDS_FOR_A_COPY = 5.0
"""How long an in-memory checkpoint waits for the previous one, once; after that, steps continue
without copies."""


SHARE = 0.02
"""Largest share of the training time that copies may cost."""
_LEAST = 2
"""Lower bound of the interval. Steps without a copy are needed as the baseline for those with one.
"""
_BASELINE_STEPS = 32
"""Number of steps without a copy that the baseline uses."""


class CopyInterval:
    """Number of steps between copies for which a copy, by the cost of the last one, takes at most
    `SHARE` of the time, and never more than `most` steps.

    A copy costs the seconds that a step waits for it, plus the extra seconds of steps that run
    while it is written.

    Args:
        most: largest interval in steps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds_without_copy: deque[float] = deque(maxlen=_BASELINE_STEPS)
        self._cost: float | None = None

    def add_step(self, seconds: float, *, beside: bool) -> None:
        """Add the time of a finished step.

        Args:
            seconds: duration of the step.
            beside: whether a copy was in progress during the step.
        """
        if not beside:
            self._seconds_without_copy.append(seconds)
        elif self._cost is not None and self._seconds_without_copy:
            # A step during a copy competes with it for cores; its extra time is part of the cost.
            self._cost += max(0.0, seconds - median(self._seconds_without_copy))

    def start_copy(self, seconds: float) -> None:
        """Start the cost of a new copy with the seconds that the training waited for it."""
        self._cost = seconds

    @property
    def steps(self) -> int:
        """This rank's interval in steps, by the cost of the last copy; `most` if there was none."""
        if self._cost is None or not self._seconds_without_copy:
            return self._most
        steps = math.ceil(self._cost / (SHARE * median(self._seconds_without_copy)))
        return min(self._most, max(_LEAST, steps))


class MemoryCopies:
    """In-memory checkpoints on one rank. All methods but `add_step` are collective.

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

    def add_step(self, record: StepRecord) -> None:
        """Add the time of a finished step."""
        if self._interval:
            self._interval.add_step(record.seconds, beside=self._was_saving)
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
                    f"checkpoint.hot_bytes: {self._limit_bytes}: no in-memory checkpoints, because "
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
            self._interval.start_copy(waited)
            self._was_saving = True
        return waited

    def _agree_on_interval(self) -> int:
        """Return the longest interval that any rank wants. Collective."""
        if self._interval is None:
            return self._every
        # The longest interval, because every rank takes part in a copy and one may find it
        # expensive.
        wanted = torch.tensor(self._interval.steps, dtype=torch.int32)
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        return int(wanted.item())


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Progress and further values that a commit stores with the state."""

    step: int
    samples: int
    tokens: int
    extra: Mapping[str, Any]
