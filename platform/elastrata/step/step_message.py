"""Numbers that are reduced with the losses of a step.

They are the next action, the compute time of each rank, and the sums of the next step, which then
need no message for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastrata.device.device_transfer import to_device
from elastrata.step.events import Action


@dataclass(frozen=True)
class Effort:
    """A rank's compute time and work in a step."""

    seconds: float
    """Without the time that it waits for other ranks."""
    work: float
    """By the work model of the deal; 0 if the rank had only fillers."""


@dataclass(frozen=True)
class StepMessage:
    """The numbers after their sum over all ranks."""

    action: Action
    """Action that rank 0 sent."""
    efforts: tuple[Effort, ...]
    """Efforts by rank; empty with one rank."""
    next_sums: Mapping[str, float] | None
    """Sums of the next step over its global batch; None if a rank did not have its part ready."""

    @classmethod
    def read(cls, numbers: Sequence[float], names: Sequence[str], world_size: int) -> StepMessage:
        """Parse the summed numbers."""
        action, num_ready, *rest = numbers
        slots = num_slots(world_size)
        efforts, sums = rest[:slots], rest[slots:]
        is_complete = bool(names) and int(num_ready) == world_size
        return cls(
            action=Action(int(action)),
            efforts=tuple(map(Effort, efforts[::2], efforts[1::2])),
            next_sums=dict(zip(names, sums, strict=True)) if is_complete else None,
        )


def num_slots(world_size: int) -> int:
    """Return how many numbers the efforts take; zero for one rank, which has no other to compare
    with."""
    return 2 * world_size if world_size > 1 else 0


def _get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def encode(
    action: Action,
    effort: Effort,
    next_sums: Mapping[str, float] | None,
    names: Sequence[str],
    device: torch.device,
    *,
    world_size: int,
    is_primary: bool,
) -> Tensor:
    """Return this rank's summand: float64, on `device`, shape [2 + slots + number of names].

    It does not synchronise with the device.
    """
    is_ready = next_sums is not None and sorted(next_sums) == list(names)
    # Other ranks of a data rank have the same samples, which must count once.
    summands = next_sums if is_ready and is_primary else None
    sums = [summands[name] if summands else 0.0 for name in names]
    efforts, rank = [0.0] * num_slots(world_size), _get_rank()
    # Every rank fills its slots and leaves zeros in the others, so that the sum gathers all
    # efforts.
    efforts[2 * rank : 2 * rank + 2] = [effort.seconds, effort.work] if efforts else []
    own_numbers = [float(action), float(is_ready), *efforts, *sums]
    numbers = torch.tensor(own_numbers, dtype=torch.float64)
    return to_device(numbers, device)
