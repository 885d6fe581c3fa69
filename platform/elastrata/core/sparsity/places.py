"""The places of a shard's elements in the whole matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from elastrata.core.optimizers.sharding import MeshAxis, local, sharding_axes


def rows_and_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows and which columns of the whole matrix this rank's shard has: int64, of shapes
    [rows] and [columns] of the shard, either maybe empty.

    Args:
        matrix: shape [m, n], plain or a DTensor of any layout that divides rows or columns.
    """
    places = [torch.arange(size, device=local(matrix).device) for size in matrix.shape]
    for axis in _as_divided(matrix):
        parts = torch.chunk(places[axis.dim], axis.size)  # the last ones may be missing
        places[axis.dim] = parts[axis.rank] if axis.rank < len(parts) else places[axis.dim][:0]
    return places[0], places[1]


def elements(matrix: Tensor) -> Tensor:
    """The place of each element of this rank's shard in the whole matrix, counted row by row;
    int64, of the shard's shape."""
    rows, columns = rows_and_columns(matrix)
    return rows[:, None] * matrix.shape[1] + columns


def _as_divided(matrix: Tensor) -> list[MeshAxis]:
    """The axes in the order in which they divided the matrix: along the mesh, but FSDP2 divides
    what tensor parallelism left, and says so by a placement of its own (`_StridedShard`)."""
    if not isinstance(matrix, DTensor):
        return []
    axes, placements = sharding_axes(matrix), matrix.placements
    plain = [axis for axis in axes if type(placements[axis.place]) is Shard]
    return [*plain, *(axis for axis in reversed(axes) if axis not in plain)]
