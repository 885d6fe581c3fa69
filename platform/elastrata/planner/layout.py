"""Layouts: division of a model and its batch among devices."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.parallel.parallelize import GradientSync, Schedule

MOST_SAMPLES = 64
"""Largest number of full-length samples in a micro-batch. Devices saturate long before it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes whose product is the number of devices.

    From innermost to outermost, devices are ordered by `tensor`, `shards`, `copies` and `pipeline`.
    """

    tensor: int = 1
    sequence: bool = False
    """Whether tensor-parallel devices divide tokens between the matrices (sequence parallelism)."""
    pipeline: int = 1
    virtual_stages: int = 1
    """Parts of the model on each device of a pipeline."""
    schedule: Schedule = "1f1b"
    stage_speeds: tuple[float, ...] = ()
    """Relative speeds of the devices of a pipeline, in order; empty if equal."""
    shards: int = 1
    """Devices that share one copy of parameters, gradients and optimizer states."""
    copies: int = 1
    """Copies of the model. With several copies and several shards this is HSDP."""
    micro_batch: int = 1
    """Samples of a micro-batch."""
    checkpointing: Recomputation = "none"
    gradient_sync: GradientSync = "step"
    reshard: bool = True
    """Whether gathered parameters are freed after each block's forward pass."""

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, which all process different samples."""
        return self.shards * self.copies

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.tensor * self.pipeline * self.data

    def micro_batches(self, batch_size: int) -> int:
        """Return the number of micro-batches of each data-parallel rank in a step."""
        return -(-batch_size // (self.data * self.micro_batch))

    @property
    def division(self) -> str:
        """The layout in words, without the values that can change between steps."""
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
        # Defaults are omitted, to keep the tables of `elastrata plan` narrow.
        pieces += [] if self.reshard or self.shards == 1 else ["keep"]
        pieces += [] if self.gradient_sync == "step" else ["reduce each"]
        return " ".join(pieces)
