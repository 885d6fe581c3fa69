"""What of a tensor lies where: its local shard, and the mesh axes that divide it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh, as this rank sees it, with how it divides a tensor."""

    mesh: DeviceMesh
    place: int
    placement: Placement

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks along the axis, this one among them."""
        return self.mesh.get_group(self.place)

    @property
    def size(self) -> int:
        """How many they are."""
        return self.mesh.size(self.place)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank(self.place)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, maybe empty, on the same memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharding_axes(tensor: Tensor) -> tuple[MeshAxis, ...]:
    """The axes of its mesh that divide `tensor` over more than one rank. Axes that replicate it,
    as HSDP's first, are none of them."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = (
        MeshAxis(tensor.device_mesh, place, placement)
        for place, placement in enumerate(tensor.placements)
    )
    return tuple(axis for axis in axes if axis.size > 1 and not axis.placement.is_replicate())
