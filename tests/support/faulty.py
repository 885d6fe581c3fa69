"""A workload in which one rank goes wrong: it raises, or takes more memory than there is, once, or
has too little on its device for large micro-batches."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from elastrata.workload.workload import Loss
from elastrata_workloads.bert import Bert

RANK = 1
MEMORY_LIMIT = "RAY_memory_usage_threshold"
"""Ray's variable; a node's processes inherit it."""
_BLOCK_BYTES = 2**27
_SECONDS_TO_BE_KILLED = 60.0
_losses = 0


class FaultyBert(Bert):
    """BERT that goes wrong on one rank.

    Fields:
        fault: what rank 1 does, or those on a node with a limit of memory.
        after: losses that its process computes before.
        memory_bytes: what it takes, where that is its fault.
        marker: a file that is made when it happens; it does not happen where there is one.
        positions: of the largest micro-batch that fits, where a device has too little memory.
    """

    fault: Literal["raises", "takes all memory", "has a small device"]
    after: int = 0
    positions: int = 0
    memory_bytes: int = 0
    marker: Path

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        global _losses
        if self.fault == "has a small device":
            if dist.get_rank() == RANK and batch.num_positions > self.positions:
                raise torch.OutOfMemoryError(f"no room for {batch.num_positions} positions")
            return super().loss(model, batch)
        _losses += 1
        if self._is_faulty() and _losses > self.after and not self.marker.exists():
            self.marker.touch()
            if self.fault == "raises":
                raise OSError(5, "Input/output error")
            taken = [
                torch.ones(_BLOCK_BYTES // 4) for _ in range(self.memory_bytes // _BLOCK_BYTES)
            ]
            Event().wait(_SECONDS_TO_BE_KILLED)
            raise AssertionError(f"nobody minds {len(taken)} blocks of {_BLOCK_BYTES} bytes")
        return super().loss(model, batch)

    def _is_faulty(self) -> bool:
        return dist.get_rank() == RANK if self.fault == "raises" else MEMORY_LIMIT in os.environ
