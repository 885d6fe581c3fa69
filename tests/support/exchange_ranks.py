"""Ranks that exchange parts of a tensor, at once and in two hops."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from elastrata.parallel.reduction import DeterministicReduceScatter, Reduction, build_exchange
from elastrata.parallel.reduction import direct_exchange as at_once
from elastrata.parallel.reduction import wait_and_run as wait

PART = 3


def exchanged(rank: int, world_size: int, nodes: list[int]) -> dict[str, list[Tensor]]:
    """What this rank has of all others, each way; and what reductions make of it."""
    world = dist.group.WORLD
    assert world is not None
    ways = {"at once": at_once(world), "hops": build_exchange(world, nodes, "gloo")}
    sent = torch.randn(world_size * PART, generator=torch.Generator().manual_seed(rank))
    found = {}
    for name, way in ways.items():
        received, half, ordered = torch.empty_like(sent), torch.empty(PART), torch.empty(PART)
        way(received, sent).wait()
        Reduction(torch.bfloat16, wait, exchange=way)(half, sent, world, dist.ReduceOp.SUM)
        deterministic = DeterministicReduceScatter(way)
        deterministic(ordered, sent, world, dist.ReduceOp.SUM)
        found[name] = [received, half, ordered]
    return found
