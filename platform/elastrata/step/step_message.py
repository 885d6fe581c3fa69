"""Numbers that travel with the losses of a step: what all ranks are to do after it, how long each
of them took, and the sums of the next step, which then need no message of their own."""

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
    """A rank's share in the passes of a step."""

    seconds: float
    """Of its own, without those that it waits for others."""
    work: float
    """By the work model of the deal; 0: fillers alone."""


@dataclass(frozen=True)
class StepMessage:
    """The numbers of all ranks, added up."""

    action: Action
    """The one that rank 0 brought."""
    efforts: tuple[Effort, ...]
    """Of every rank; none where there is one rank."""
    next_sums: Mapping[str, float] | None
    """The sums of the next step over its global batch; None where a rank did not have it ready."""

    @classmethod
    def read(cls, numbers: Sequence[float], names: Sequence[str], world_size: int) -> StepMessage:
        """What the numbers say."""
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
    """Numbers for the efforts of all ranks; a lone one is compared with nobody."""
    return 2 * world_size if world_size > 1 else 0


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def written(
    action: Action,
    effort: Effort,
    next_sums: Mapping[str, float] | None,
    names: Sequence[str],
    device: torch.device,
    *,
    world_size: int,
    is_primary: bool,
) -> Tensor:
    """What this rank adds: float64, on `device`, shape [2 + slots + number of names]. Waits for no
    device."""
    is_ready = next_sums is not None and sorted(next_sums) == list(names)
    adds = next_sums if is_ready and is_primary else None
    sums = [adds[name] if adds else 0.0 for name in names]
    efforts, rank = [0.0] * num_slots(world_size), _own_rank()
    efforts[2 * rank : 2 * rank + 2] = [effort.seconds, effort.work] if efforts else []
    told = [float(action), float(is_ready), *efforts, *sums]
    numbers = torch.tensor(told, dtype=torch.float64)
    return to_device(numbers, device)
