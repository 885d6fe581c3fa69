"""The sharding of a tensor: its local shard, and the mesh axes that divide it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastrata.parallel.fsdp_internals import StridedShard


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh, as this rank sees it, with how it divides a tensor. Of two tensors it is
    the same axis, whichever of their dims it divides."""

    mesh: DeviceMesh
    number: int
    """Its number in the mesh."""
    dim: int = field(compare=False)
    """The dim of the tensor that is divided, after the axes further in have divided it."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks along the axis, this one among them."""
        return self.mesh.get_group(self.number)

    @property
    def size(self) -> int:
        """How many they are."""
        return self.mesh.size(self.number)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank(self.number)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, maybe empty, on the same memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def resharded(tensor: Tensor, shard: Tensor) -> Tensor:
    """Other values, sharded as `tensor` is; on whatever device they are."""
    if not isinstance(tensor, DTensor):
        return shard
    # `DTensor.from_local` would copy them to the device of the mesh.
    return DTensor(shard, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def sharding_axes(tensor: Tensor) -> tuple[MeshAxis, ...]:
    """The axes of its mesh that divide `tensor` over more than one rank, in the mesh's order. Axes
    that replicate it, as HSDP's first, are none of them."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        MeshAxis(mesh, number, placement.dim)
        for number, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | StridedShard) and mesh.size(number) > 1
    )


def axes_as_divided(tensor: Tensor) -> list[MeshAxis]:
    """The axes in the order in which they divided the tensor: along the mesh, but FSDP2 divides
    what tensor parallelism left, and says so by a placement of its own (`_StridedShard`)."""
    if not isinstance(tensor, DTensor):
        return []
    axes, placements = sharding_axes(tensor), tensor.placements
    plain = [axis for axis in axes if type(placements[axis.number]) is Shard]
    return [*plain, *(axis for axis in reversed(axes) if axis not in plain)]


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard, maybe empty, of a tensor that every rank has: a view.

    Args:
        whole: of the shape of `like`.
        like: says how it is divided; its values do not matter.
    """
    part = whole
    for axis in axes_as_divided(like):
        parts = torch.chunk(part, axis.size, dim=axis.dim)  # the last ones may be missing
        part = parts[axis.rank] if axis.rank < len(parts) else part.narrow(axis.dim, 0, 0)
    return part


def own_box(like: Tensor) -> tuple[slice, ...]:
    """The place of this rank's shard, maybe empty, in the whole tensor: a range in each dim."""
    part = own_part(torch.empty(like.shape, device="meta"), like)
    starts, offset = [], part.storage_offset()
    for stride in torch.empty(like.shape, device="meta").stride():
        starts.append(offset // stride)
        offset %= stride
    return tuple(slice(first, first + n) for first, n in zip(starts, part.shape, strict=True))
