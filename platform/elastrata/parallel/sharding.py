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
    """One axis of a mesh from this rank's view, and the dim of a tensor that it divides.

    Axes are equal for different tensors, regardless of the dim.
    """

    mesh: DeviceMesh
    number: int
    """Index of the axis in the mesh."""
    dim: int = field(compare=False)
    """Divided dim of the tensor, after the inner axes have divided it."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks along the axis, this one included."""
        return self.mesh.get_group(self.number)

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return self.mesh.size(self.number)

    @property
    def rank(self) -> int:
        """This rank's index along the axis."""
        return self.mesh.get_local_rank(self.number)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, maybe empty, with shared memory; a plain tensor is its own
    shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor with the local values `shard` and the sharding of `tensor`, on any device."""
    if not isinstance(tensor, DTensor):
        return shard
    # `DTensor.from_local` would copy the values to the device of the mesh.
    return DTensor(shard, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def sharding_axes(tensor: Tensor) -> tuple[MeshAxis, ...]:
    """Return the mesh axes that divide `tensor` over more than one rank, in the mesh's order.

    Axes that replicate it, such as the first one of HSDP, are not included.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        MeshAxis(mesh, number, placement.dim)
        for number, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | StridedShard) and mesh.size(number) > 1
    )


def axes_in_division_order(tensor: Tensor) -> list[MeshAxis]:
    """Return the axes in the order in which they divided the tensor."""
    if not isinstance(tensor, DTensor):
        return []
    axes, placements = sharding_axes(tensor), tensor.placements
    # The order of the mesh, except that FSDP2 divides the shards of tensor parallelism, which it
    # marks with the placement `_StridedShard`.
    plain = [axis for axis in axes if type(placements[axis.number]) is Shard]
    # Strided axes divided afterwards, from the innermost to the outermost.
    return [*plain, *(axis for axis in reversed(axes) if axis not in plain)]


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard, maybe empty, of a tensor that every rank has, as a view.

    Args:
        whole: tensor of the shape of `like`.
        like: tensor with the sharding; its values are not used.
    """
    part = whole
    for axis in axes_in_division_order(like):
        parts = torch.chunk(part, axis.size, dim=axis.dim)  # may return fewer parts
        part = parts[axis.rank] if axis.rank < len(parts) else part.narrow(axis.dim, 0, 0)
    return part


def local_box(like: Tensor) -> tuple[slice, ...]:
    """Return the place of this rank's shard, maybe empty, in the whole tensor: a range for each
    dim."""
    # Views of meta tensors have the offset of the shard, without memory.
    part = local_part(torch.empty(like.shape, device="meta"), like)
    starts, offset = [], part.storage_offset()
    for stride in torch.empty(like.shape, device="meta").stride():
        starts.append(offset // stride)
        offset %= stride
    return tuple(slice(first, first + n) for first, n in zip(starts, part.shape, strict=True))
