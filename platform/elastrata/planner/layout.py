"""A layout: how devices divide a model and its batch among them."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.parallel.parallelize import GradientSync, Schedule

MOST_SAMPLES = 64
"""Longest samples in a micro-batch: devices are full long before."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes whose product is the number of devices. Neighbouring devices share a sample (`tensor`),
    then a copy of the state (`shards`), then come other copies, then the next stage."""

    tensor: int = 1
    sequence: bool = False
    """Whether tokens are divided as well, between the matrices."""
    pipeline: int = 1
    virtual_stages: int = 1
    """Parts of the model on each device of a pipeline."""
    schedule: Schedule = "1f1b"
    stage_speeds: tuple[float, ...] = ()
    """How fast the devices of a pipeline are, one after the other; empty where equally fast."""
    shards: int = 1
    """Devices that share one copy of parameters, gradients and optimizer states."""
    copies: int = 1
    """Copies of the model; HSDP where there are several and each is sharded."""
    micro_batch: int = 1
    """Samples that go through the model together."""
    checkpointing: Recomputation = "none"
    gradient_sync: GradientSync = "step"
    reshard: bool = True
    """Whether gathered parameters are dropped after each block's forward pass."""

    @property
    def data(self) -> int:
        """Data-parallel ranks: each has samples of its own."""
        return self.shards * self.copies

    @property
    def devices(self) -> int:
        """In all."""
        return self.tensor * self.pipeline * self.data

    def micro_batches(self, batch_size: int) -> int:
        """Micro-batches that each data-parallel rank runs through the model in a step."""
        return -(-batch_size // (self.data * self.micro_batch))

    @property
    def division(self) -> str:
        """In words, without what may change from step to step."""
        pieces = [f"tp{self.tensor}{'+sp' if self.sequence else ''}", f"pp{self.pipeline}"]
        if self.pipeline > 1:
            pieces[-1] += f" {self.schedule}" + (
                f" x{self.virtual_stages}" if self.virtual_stages > 1 else ""
            )
        return " ".join([*pieces, f"{self.copies}x{self.shards}"])

    def __str__(self) -> str:
        pieces = [self.division, f"mb{self.micro_batch}"]
        names = {"none": [], "selective": ["recompute half"], "full": ["recompute"]}
        pieces += names[self.checkpointing]
        pieces += [] if self.reshard or self.shards == 1 else ["keep"]
        pieces += [] if self.gradient_sync == "step" else ["reduce each"]
        return " ".join(pieces)
