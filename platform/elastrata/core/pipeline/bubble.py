"""The bubble of a pipeline: the share of a step that its ranks wait for each other, from the
schedule alone. Numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward whole, or in two parts: gradients of the inputs, then of the weights."""
Action = tuple[int, Kind, int]
"""Stage, kind, micro-batch."""
_PARTS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
_CALLED: Mapping[Kind, Kind] = {"B": "I"}
"""The stage before waits for the gradient of the inputs alone."""


def bubble(
    order: Mapping[int, Sequence[Action]], costs: Sequence[float], *, recomputed: float
) -> float:
    """1 - (seconds all ranks compute) / (ranks * seconds until the last one has finished).

    A rank does one thing after the other, each as soon as what it needs is there. A forward pass
    takes the cost of its stage, either part of a backward pass as much again, besides what is
    recomputed in it. Messages take no time. Stages of equal costs c make it
    (p - 1) / (m + p - 1) with GPipe and 1F1B on p ranks with m micro-batches, and
    (p - 1) / (v m + p - 1) interleaved with v stages on a rank (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2, over the whole step).

    Args:
        order: what each rank does, in order.
        costs: of a forward pass through each stage.
        recomputed: the share of a forward pass that a backward pass computes again.

    Raises:
        ValueError: no rank can go on, as each waits for what never comes.
    """
    left = {rank: list(actions) for rank, actions in order.items()}
    free = dict.fromkeys(order, 0.0)
    ended: dict[Action, float] = {}
    busy = 0.0
    while any(left.values()):
        waiting = [rank for rank, actions in left.items() if actions]
        ready = [r for r in waiting if _needed(left[r][0], len(costs)) <= ended.keys()]
        if not ready:
            raise ValueError("a schedule in which every rank waits")
        for rank in ready:
            stage, kind, batch = action = left[rank].pop(0)
            seconds = costs[stage] * (_PARTS[kind] + (recomputed if kind in "BI" else 0.0))
            needed = (ended[other] for other in _needed(action, len(costs)))
            free[rank] = max(free[rank], *needed, 0.0) + seconds
            ended[stage, _CALLED.get(kind, kind), batch] = free[rank]
            busy += seconds
    return 1 - busy / (len(order) * max(free.values()))


def one_stage_order(
    num_ranks: int, num_micro_batches: int, *, interleaves: bool
) -> dict[int, list[Action]]:
    """The order of ranks with one stage each: GPipe, or 1F1B, in which rank r has at most
    `num_ranks` - r micro-batches under way.

    torch's own plan of 1F1B (`Schedule1F1B.pipeline_order` of torch 2.13) counts the micro-batches
    of its last rank from 1.
    """
    order: dict[int, list[Action]] = {}
    for rank in range(num_ranks):
        most = num_ranks - rank if interleaves else num_micro_batches
        order[rank] = []
        for batch in range(num_micro_batches + most):
            if batch >= most and batch - most < num_micro_batches:
                order[rank].append((rank, "B", batch - most))
            if batch < num_micro_batches:
                order[rank].append((rank, "F", batch))
    return order


def computations(order: Mapping[int, Sequence[Any]]) -> dict[int, list[Action]]:
    """What every rank computes in torch's plan (`pipeline_order`), without messages and waits."""
    return {
        rank: [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in actions
            if action is not None and action.is_compute_op
        ]
        for rank, actions in order.items()
    }


def _needed(action: Action, num_stages: int) -> set[Action]:
    """The actions that must have ended before."""
    stage, kind, batch = action
    if kind == "F":
        return {(stage - 1, "F", batch)} if stage else set()
    if kind == "W":
        return {(stage, "I", batch)}
    later: set[Action] = {(stage + 1, "I", batch)} if stage + 1 < num_stages else set()
    return {(stage, "F", batch), *later}
