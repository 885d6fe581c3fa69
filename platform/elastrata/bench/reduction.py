"""The reduction of gradients, measured: the collectives of a recipe's buckets between processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from elastrata.bench.measurement import Quartiles, quartiles
from elastrata.core.fsdp_internals import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from elastrata.core.mesh import backends, rank_mesh
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.recipe import Recipe

_PATIENCE = timedelta(seconds=120)
_REDUCED = torch.float32
"""Gradients are always reduced in it."""
Seconds = dict[str, list[float]]
"""By collective, the seconds of each round."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFigures:
    """One collective over all buckets, one after the other. Quartiles are over the rounds."""

    collective: str
    """`all_reduce`, `reduce_scatter`, `all_gather`."""
    bytes: int
    """All buckets, once."""
    seconds: Quartiles
    """The process that took longest."""
    gigabytes_per_second: float
    """Bytes that each of N processes has to send over the median: 2 (N - 1) / N of `bytes` for
    all_reduce, half of that for the others."""


@dataclass(frozen=True, kw_only=True)
class ReductionFigures:
    """The collectives of a model between processes on this machine."""

    backend: str
    """`nccl`, with a GPU for each process, or `gloo`, with a CPU thread for each."""
    processes: int
    buckets: int
    parameters: int
    collectives: tuple[CollectiveFigures, ...]
    seconds_scattered: Quartiles
    """reduce_scatter and all_gather, what FSDP2 does in place of all_reduce; it gathers once more,
    for the backward pass."""


def measure_reduction(
    buckets: Sequence[int], *, processes: int, gathered: torch.dtype, rounds: int, warm_up: int
) -> ReductionFigures:
    """Runs the collectives of all buckets between new processes.

    Args:
        buckets: numbers in each.
        processes: at least 2.
        gathered: type of the parameters that are gathered.
        rounds: those that count.
        warm_up: rounds before them.
    """
    group = _Group(
        backend="nccl" if torch.cuda.device_count() >= processes else "gloo",
        processes=processes,
        buckets=tuple(buckets),
        gathered=gathered,
    )
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(  # type: ignore[no-untyped-call]
            _on_rank, (group, Path(folder) / "store", warm_up + rounds, results), nprocs=processes
        )
    seconds = {name: taken[warm_up:] for name, taken in results.get().items()}
    pairs = zip(seconds["reduce_scatter"], seconds["all_gather"], strict=True)
    return ReductionFigures(
        backend=group.backend,
        processes=processes,
        buckets=len(buckets),
        parameters=sum(buckets),
        collectives=tuple(group.figures(name, taken) for name, taken in seconds.items()),
        seconds_scattered=quartiles([scatter + gather for scatter, gather in pairs]),
    )


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The group of processes, as each of them knows it."""

    backend: str
    processes: int
    buckets: tuple[int, ...]
    gathered: torch.dtype

    def figures(self, collective: str, taken: Sequence[float]) -> CollectiveFigures:
        """`taken`: the seconds of each round."""
        dtype = self.gathered if collective == "all_gather" else _REDUCED
        size, seconds = sum(self.buckets) * dtype.itemsize, quartiles(taken)
        ways = 2 if collective == "all_reduce" else 1
        sent = ways * size * (self.processes - 1) / self.processes
        return CollectiveFigures(
            collective=collective,
            bytes=size,
            seconds=seconds,
            gigabytes_per_second=sent / seconds.median / 1e9,
        )

    def bucket_buffers(
        self, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """Per bucket the whole of it, with room for equal parts, and this process's part; all of
        them share the memory of the largest."""
        padded = [-(-size // self.processes) * self.processes for size in self.buckets]
        whole = torch.zeros(max(padded), dtype=dtype, device=device)
        part = torch.zeros(max(padded) // self.processes, dtype=dtype, device=device)
        return [(whole[:size], part[: size // self.processes]) for size in padded]


def _on_rank(rank: int, group: _Group, store: Path, rounds: int, results: Any) -> None:
    """One process; the first one puts the seconds of the slowest into `results`."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if group.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backends(device.type),
        init_method=f"file://{store}",
        rank=rank,
        world_size=group.processes,
        timeout=_PATIENCE,
    )
    seconds = _timed(group, device, rounds)
    if rank == 0:
        results.put(seconds)
    dist.destroy_process_group()


def _timed(group: _Group, device: torch.device, rounds: int) -> Seconds:
    """Makes the calls that FSDP2 makes. They take turns, so that whatever else the machine does
    falls on all of them. Collective."""
    reduced = group.bucket_buffers(_REDUCED, device)
    gathered = group.bucket_buffers(group.gathered, device)
    scatter, gather = DefaultReduceScatter(), DefaultAllGather()
    ranks = rank_mesh(device.type, group.processes, replicate=1).get_group()
    turns: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: [dist.all_reduce(whole, group=ranks) for whole, _ in reduced],
        "reduce_scatter": lambda: [
            scatter(part, whole, ranks, dist.ReduceOp.SUM) for whole, part in reduced
        ],
        "all_gather": lambda: [gather(whole, part, ranks) for whole, part in gathered],
    }
    taken: Seconds = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            dist.barrier()
            began = time.perf_counter()
            turn()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken[name].append(time.perf_counter() - began)
    slowest = torch.tensor(list(taken.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(taken, slowest.tolist(), strict=True))


def bucket_sizes(recipe: Recipe) -> list[int]:
    """Numbers in each block, first to last, and in what is left of the model.

    Raises:
        UserError: the size of the vocabulary is not known before the data is prepared.
    """
    spec = data_spec(recipe)
    with torch.device("meta"):
        model = recipe.workload.build_model(spec.vocabulary, spec.seq_len)
    blocks = [
        sum(parameter.numel() for parameter in block.parameters())
        for block in recipe.workload.blocks(model)
    ]
    whole = sum(parameter.numel() for parameter in model.parameters())
    return [*blocks, whole - sum(blocks)]
