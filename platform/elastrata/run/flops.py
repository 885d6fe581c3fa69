"""The FLOPs of a run, phase by phase: what it would have cost dense, and what it needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PhaseFlops:
    """Forward and backward of all steps of a phase, by the workload's formula."""

    last_step: int
    dense: int
    """With products with weights at zero."""
    needed: int
    """Without them."""

    def to_metrics(self) -> dict[str, float]:
        """The values to track, by metric name."""
        return {"flops/dense": self.dense, "flops/needed": self.needed}


def flops_by_phase(
    steps: Sequence[Mapping[str, Any]], last_steps: Sequence[int]
) -> list[PhaseFlops]:
    """Those of a run's phases that were begun.

    Args:
        steps: the steps of its history that count.
        last_steps: of its phases, in their order.
    """
    found, first = [], 1
    for last in last_steps:
        of_phase = [step for step in steps if first <= step["step"] <= last]
        if of_phase:
            dense = sum(step["flops"] for step in of_phase)
            zeros = sum(step.get("flops_of_zeros", 0) for step in of_phase)
            found.append(PhaseFlops(last_step=last, dense=dense, needed=dense - zeros))
        first = last + 1
    return found
