"""Runs a function on several gloo ranks, each a process of its own."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from support.forks import forks

MAX_RANKS = 8
_PATIENCE = timedelta(seconds=540)
"""Less than pytest's limit of a test, which cannot end ranks that wait for each other."""

Pool = Sequence[ProcessPoolExecutor]
"""A process for each rank. It never is another one: DTensor remembers, for equal meshes, which part
of a tensor the process has."""


def _new_pool() -> Pool:
    return [ProcessPoolExecutor(1, mp_context=forks()) for _ in range(MAX_RANKS)]


@cache
def _pool() -> Pool:
    """Kept from test to test: what torch sets up at its first use takes a process a second."""
    return _new_pool()


def run_fresh_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_ranks` in new processes. For meshes of two axes: in a process that had an equal one
    before, DTensor finds that one's process groups, which are gone."""
    pool = _new_pool()
    try:
        return _run(pool, world_size, function, args)
    finally:
        for process in pool:
            process.shutdown()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, world_size, *args)` on every rank; its results by rank.

    The function must live in a module that other processes can import.
    """
    return _run(_pool(), world_size, function, args)


def _run(
    pool: Pool, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    assert world_size <= MAX_RANKS
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        futures = [
            process.submit(_on_rank, store, rank, world_size, function, args)
            for rank, process in enumerate(pool[:world_size])
        ]
        return [future.result(timeout=_PATIENCE.seconds) for future in futures]


def _on_rank(
    store: Path, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    random.seed(0)  # the process has drawn numbers for the tests before
    np.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=_PATIENCE,
    )
    try:
        return function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
