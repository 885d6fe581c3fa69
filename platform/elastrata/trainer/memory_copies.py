"""Copies of the state in the memory of other processes: whether there is room for any, when one is
due, and what is done where the one before is stuck."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastrata.checkpoints.checkpoint import DurableSaver, replica_saver
from elastrata.checkpoints.retention import CheckpointConfig
from elastrata.checkpoints.staging import Stager, state_bytes
from elastrata.core.copy_interval import CopyInterval
from elastrata.core.record import StepRecord
from elastrata.replicas.storage import Replicas
from elastrata.replicas.store import most_per_node

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
