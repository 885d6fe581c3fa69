"""Numbers that travel with the losses of a step: what all ranks are to do after it, and the sums of
the next step, which then need no message of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastrata.core.control_signal import Action
from elastrata.core.readback import to_device


@dataclass(frozen=True)
class StepMessage:
    """The numbers of all ranks, added up."""

    action: Action
    """The one that rank 0 brought."""
    next_sums: Mapping[str, float] | None
    """The sums of the next step over its global batch; None where a rank did not have it ready."""

    @classmethod
    def read(cls, numbers: Sequence[float], names: Sequence[str], world_size: int) -> StepMessage:
        """What the numbers say.

        Args:
            numbers: `written` of all ranks, added up.
            names: of the sums.
            world_size: number of ranks.
        """
        action, num_ready, *sums = numbers
        is_complete = bool(names) and int(num_ready) == world_size
        return cls(
            action=Action(int(action)),
            next_sums=dict(zip(names, sums, strict=True)) if is_complete else None,
        )


def written(
    action: Action,
    next_sums: Mapping[str, float] | None,
    names: Sequence[str],
    device: torch.device,
    *,
    is_primary: bool,
) -> Tensor:
    """What this rank adds: float64, on `device`, shape [2 + number of names]. Waits for no device.

    Args:
        action: asked of all ranks, on rank 0; elsewhere `Action.GO_ON`, which is 0.
        next_sums: what this rank adds to the sums of the next step; None: it is not ready.
        names: of the sums, sorted, the same on every rank.
        device: of the losses.
        is_primary: whether this rank's sums are added up.
    """
    is_ready = next_sums is not None and sorted(next_sums) == list(names)
    adds = next_sums if is_ready and is_primary else None
    sums = [adds[name] if adds else 0.0 for name in names]
    numbers = torch.tensor([float(action), float(is_ready), *sums], dtype=torch.float64)
    return to_device(numbers, device)
