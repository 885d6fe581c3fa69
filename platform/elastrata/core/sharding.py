"""The sharding of a tensor: its local shard, and the mesh axes that divide it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastrata.core.fsdp_internals import StridedShard


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
