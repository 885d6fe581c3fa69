"""A function of whole matrices, applied to matrices of which each rank has some part.

Every rank computes a share of the matrices: all ranks send it their parts of them, and get back
their parts of the results. Where two axes of a mesh divide a matrix, as FSDP2 and tensor
parallelism do, this happens along one of them inside the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastrata.core.sharding import MeshAxis, sharding_axes


@dataclass(frozen=True)
class _Part:
    """A part of a matrix, on this rank."""

    whole: torch.Size
    """Shape of the matrix, [m, n]."""
    axes: tuple[MeshAxis, ...]
    """The axes that divide it, outermost first; the innermost one has divided it first."""
    values: Tensor

    def shape_on(self, rank: int) -> torch.Size:
        """The shape on that rank along the outermost axis, as `torch.chunk` deals: the last ranks
        may have less than others, or nothing."""
        sizes, outermost = list(self.whole), self.axes[0]
        for axis in reversed(self.axes):
            most = -(-sizes[axis.dim] // axis.size)
            here = rank if axis is outermost else axis.rank
            sizes[axis.dim] = max(0, min(most, sizes[axis.dim] - here * most))
        return torch.Size(sizes)


def on_whole_matrices(
    parameters: Sequence[Tensor], shards: Sequence[Tensor], function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """`function` of matrices that are sharded as `parameters` are.

    Collective over the ranks that share the matrices: two all-to-alls along every axis of the mesh
    that divides any, however many matrices there are. A matrix is computed from the whole of it,
    so the result does not depend on how many ranks there are.

    Args:
        parameters: shapes [m, n]; say how the matrices are sharded, values do not matter.
        shards: this rank's part of one matrix per parameter, maybe empty, all of one dtype.
        function: keeps shape and dtype.

    Returns:
        This rank's parts of the results.
    """
    return _on_parts(
        [_Part(p.shape, sharding_axes(p), s) for p, s in zip(parameters, shards, strict=True)],
        function,
    )


def _on_parts(parts: Sequence[_Part], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """This rank's parts of the results.

    What the outermost axis has divided is put together along it, each matrix on one rank. The ranks
    of the other axes, which have the other parts of the same matrices, do likewise.
    """
    axes = [part.axes[0] for part in parts if part.axes]
    if not axes:
        return [function(part.values) for part in parts]
    axis = min(axes, key=lambda axis: axis.number)
    divided = [i for i, part in enumerate(parts) if part.axes and part.axes[0] == axis]
    others = [i for i in range(len(parts)) if i not in divided]
    owners = share_out([_cost(parts[i].whole) for i in divided], axis.size)
    owned = [[i for i, o in zip(divided, owners, strict=True) if o == r] for r in range(axis.size)]
    mine = [parts[i] for i in owned[axis.rank]]

    outgoing = [[parts[i].values for i in theirs] for theirs in owned]
    shapes = [[part.shape_on(r) for part in mine] for r in range(axis.size)]
    empty = parts[0].values.new_empty(0)
    received = _exchange(outgoing, shapes, axis.group, empty)
    joined = [
        _Part(part.whole, part.axes[1:], torch.cat(pieces, part.axes[0].dim))
        for part, pieces in zip(mine, zip(*received, strict=True), strict=True)
    ]
    results = _on_parts([*joined, *(parts[i] for i in others)], function)

    by_part = dict(zip(others, results[len(mine) :], strict=True))
    columns = zip(*shapes, strict=True)
    pieces = [
        torch.split(result, [shape[part.axes[0].dim] for shape in column], part.axes[0].dim)
        for part, result, column in zip(mine, results, columns, strict=False)
    ]
    back = [[piece[r] for piece in pieces] for r in range(axis.size)]
    returned = _exchange(
        back, [[v.shape for v in theirs] for theirs in outgoing], axis.group, empty
    )
    for theirs, values in zip(owned, returned, strict=True):
        by_part |= dict(zip(theirs, values, strict=True))
    return [by_part[i] for i in range(len(parts))]


def share_out(costs: Sequence[float], size: int) -> list[int]:
    """The rank for each of some pieces of work: the costliest first, each to the least busy rank
    (Graham's LPT rule)."""
    busy, owners = [0.0] * size, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        owners[piece] = min(range(size), key=lambda rank: busy[rank])
        busy[owners[piece]] += costs[piece]
    return owners


def _cost(shape: torch.Size) -> float:
    return shape.numel() * min(shape)


def _exchange(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[torch.Size]],
    group: dist.ProcessGroup,
    empty: Tensor,
) -> list[list[Tensor]]:
    """Sends `parts[r]` to rank r of the group; returns what rank r sent here, of `shapes[r]`."""
    outgoing = torch.cat([empty, *(part.reshape(-1) for theirs in parts for part in theirs)])
    sizes = [[shape.numel() for shape in theirs] for theirs in shapes]
    incoming = empty.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        incoming,
        outgoing,
        [sum(theirs) for theirs in sizes],
        [sum(part.numel() for part in theirs) for theirs in parts],
        group=group,
    )
    flat = iter(torch.split(incoming, [size for theirs in sizes for size in theirs]))
    return [[next(flat).view(shape) for shape in theirs] for theirs in shapes]
