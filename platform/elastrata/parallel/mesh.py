"""The mesh of all ranks, the place of each in it, and the groups that its collectives need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def rank_mesh(
    device_type: str,
    world_size: int,
    replicate: int | Literal["all"],
    tensor: int = 1,
    pipeline: int = 1,
) -> DeviceMesh:
    """The mesh of all ranks: [shard], or [replicate, shard] for HSDP; [..., tensor] where matrices
    are divided, so that neighbours share their samples; [pipeline, ...] where blocks are, so that
    the ranks of a stage are neighbours.

    Where `replicate` does not divide what is left of the world size, as it may be for a while after
    a shrink, the model is sharded over all of it.

    Raises:
        ValueError: `tensor` times `pipeline` does not divide the world size.
    """
    dp_size = _data_ranks(world_size, tensor * pipeline)
    copies = dp_size if replicate == "all" else replicate
    axes = {"pipeline": pipeline} if pipeline > 1 else {}
    if copies > 1 and dp_size % copies == 0:
        axes |= {"replicate": copies, "shard": dp_size // copies}
    else:
        axes["shard"] = dp_size
    if tensor > 1:
        axes["tensor"] = tensor
    return init_device_mesh(
        device_type,
        tuple(axes.values()),
        mesh_dim_names=tuple(axes),
        backend_override=_of_axes(device_type, tuple(axes)),
    )


def _of_axes(device_type: str, axes: Sequence[str]) -> dict[int | str, Any] | None:
    """The backends of the groups along the axes: on GPUs NCCL alone, as gloo would connect all
    ranks of every group with one another. A pipeline's ranks tell each other shapes through gloo.
    A single axis has the default group."""
    if device_type != "cuda" or len(axes) == 1:
        return None
    return {axis: "nccl" for axis in axes if axis != "pipeline"}


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh whose ranks have different samples: all axes but `pipeline` and
    `tensor`."""
    names = mesh.mesh_dim_names or ()
    data = tuple(name for name in names if name not in ("pipeline", "tensor"))
    return mesh if data == names else mesh[data]


@dataclass(frozen=True)
class DataRank:
    """Ranks that compute the same samples together, by tensor or pipeline parallelism, are one data
    rank."""

    rank: int
    """Number of the data rank, 0 to `dp_size` - 1."""
    dp_size: int
    """Among so many data ranks every global batch is dealt."""
    is_primary: bool
    """Whether this is the first rank of its data rank. Sums over samples are added up over these
    alone, so that they have every sample once."""


ALONE = DataRank(0, 1, is_primary=True)
"""The place of an only rank."""


def data_rank(rank: int, world_size: int, tensor: int, pipeline: int = 1) -> DataRank:
    """The place of a rank in a mesh of `rank_mesh`: `tensor` neighbours share their samples, and so
    do the ranks at the same place of each of `pipeline` equal parts of all ranks.

    Raises:
        ValueError: `tensor` times `pipeline` does not divide the world size.
    """
    dp_size = _data_ranks(world_size, tensor * pipeline)
    group = rank // tensor
    return DataRank(group % dp_size, dp_size, is_primary=group < dp_size and rank % tensor == 0)


def _data_ranks(world_size: int, group_size: int) -> int:
    if world_size % group_size:
        raise ValueError(f"{world_size} ranks in groups of {group_size}")
    return world_size // group_size


def backends(device_type: str) -> str:
    """What the collectives of a group of any size go through, as PyTorch names it: on GPUs NCCL,
    and beside it gloo for tensors in main memory, which savers and decisions reduce."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


@contextmanager
def lone_group(device: torch.device) -> Iterator[None]:
    """Runs its block in a group of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backends(device.type), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
