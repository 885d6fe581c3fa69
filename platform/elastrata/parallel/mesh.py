"""The mesh of all ranks, the place of each rank in it, and the groups that collectives need."""

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
    """Build the mesh of all ranks.

    Its axes are [shard], or [replicate, shard] for HSDP. Tensor parallelism adds the last axis
    `tensor`, so that neighbours share their samples. Pipeline parallelism adds the first axis
    `pipeline`, so that the ranks of a stage are neighbours.

    If `replicate` does not divide the remaining world size, as may be temporarily the case after a
    shrink, the model is sharded over all remaining ranks.

    Raises:
        ValueError: `tensor` times `pipeline` does not divide the world size.
    """
    dp_size = _num_data_ranks(world_size, tensor * pipeline)
    copies = dp_size if replicate == "all" else replicate
    axes = {"pipeline": pipeline} if pipeline > 1 else {}
    # Training continues with fewer workers, in another layout, rather than not at all.
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
        backend_override=_axis_backends(device_type, tuple(axes)),
    )


def _axis_backends(device_type: str, axes: Sequence[str]) -> dict[int | str, Any] | None:
    """Return the backends of the groups along the axes, or None for the default ones."""
    # A single axis uses the default group.
    if device_type != "cuda" or len(axes) == 1:
        return None
    # NCCL only, as gloo would connect all ranks of every group with each other. The ranks of a
    # pipeline need gloo to send each other shapes.
    return {axis: "nccl" for axis in axes if axis != "pipeline"}


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh whose ranks have different samples: without `pipeline` and
    `tensor`."""
    names = mesh.mesh_dim_names or ()
    data = tuple(name for name in names if name not in ("pipeline", "tensor"))
    return mesh if data == names else mesh[data]


@dataclass(frozen=True)
class DataRank:
    """A rank's place among the data ranks.

    Ranks that compute the same samples together, by tensor or pipeline parallelism, form one data
    rank.
    """

    rank: int
    """Number of the data rank, 0 to `dp_size` - 1."""
    dp_size: int
    """Number of data ranks, among which every global batch is dealt."""
    is_primary: bool
    """Whether this is the first rank of its data rank. Sums over samples include primary ranks
    only, so that every sample counts once."""


ALONE = DataRank(0, 1, is_primary=True)
"""Place of the only rank."""


def data_rank(rank: int, world_size: int, tensor: int, pipeline: int = 1) -> DataRank:
    """Return a rank's place in the mesh of `rank_mesh`.

    `tensor` neighbours share their samples, and so do the ranks at the same place in each of
    `pipeline` equal parts of all ranks.

    Raises:
        ValueError: `tensor` times `pipeline` does not divide the world size.
    """
    dp_size = _num_data_ranks(world_size, tensor * pipeline)
    group = rank // tensor
    # Primary ranks are in the first pipeline stage and the first of their tensor group.
    return DataRank(group % dp_size, dp_size, is_primary=group < dp_size and rank % tensor == 0)


def _num_data_ranks(world_size: int, group_size: int) -> int:
    if world_size % group_size:
        raise ValueError(f"{world_size} ranks in groups of {group_size}")
    return world_size // group_size


def backends(device_type: str) -> str:
    """Return PyTorch's name for the backends of a group."""
    # Gloo in addition to NCCL, for the tensors in main memory that checkpoints and decisions
    # reduce.
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


@contextmanager
def lone_group(device: torch.device) -> Iterator[None]:
    """Run the block in a process group of one rank."""
    # In this process, so that no port is needed.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backends(device.type), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
