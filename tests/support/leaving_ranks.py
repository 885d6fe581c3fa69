"""Ranks of which one fails, and leaves, while the others are in a collective."""

from __future__ import annotations

import torch
import torch.distributed as dist

FAILING = 1


def error_of(rank: int, world_size: int) -> Exception | None:
    """The error that this rank ends with."""
    dist.all_reduce(torch.ones(1))
    if rank == FAILING:
        return OSError(5, "Input/output error")
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        return error
    return None
