"""A function of whole matrices, applied to matrices of which each rank has some rows.

Every rank computes a share of the matrices: all ranks send it their rows of them, and get back
their rows of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from elastrata.training.optimizers.sharding import MeshAxis, sharding_axes


def on_whole_matrices(
    parameters: Sequence[Tensor], shards: Sequence[Tensor], function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """`function` of matrices that are sharded as `parameters` are.

    Collective over the ranks that share the matrices: two all-to-alls, however many there are.
    Every matrix is computed on one rank of each replica, so the result does not depend on how many
    ranks there are.

    Args:
        parameters: shapes [m, n], all sharded alike, on dim 0, if at all; say how, values do not
            matter.
        shards: this rank's rows of one matrix per parameter, maybe none, all of one dtype.
        function: keeps shape and dtype.

    Returns:
        This rank's rows of the results.

    Raises:
        ValueError: the parameters are sharded in another way.
    """
    axis = _common_axis(parameters)
    if axis is None:
        return [function(shard) for shard in shards]
    owners = share_out([p.numel() * min(p.shape) for p in parameters], axis.size)
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in range(axis.size)]
    here = [[shards[i] for i in theirs] for theirs in owned]
    there = [
        [_rows(parameters[i].shape, r, axis.size) for i in owned[axis.rank]]
        for r in range(axis.size)
    ]
    empty = shards[0].new_empty(0)
    received = _exchange(here, there, axis.group, empty)
    results = [function(torch.cat(parts)) for parts in zip(*received, strict=True)]
    splits = [
        torch.split(result, [rows[0] for rows in column])
        for result, column in zip(results, zip(*there, strict=True), strict=True)
    ]
    back = [[parts[r] for parts in splits] for r in range(axis.size)]
    returned = _exchange(
        back, [[part.shape for part in theirs] for theirs in here], axis.group, empty
    )
    order = [i for theirs in owned for i in theirs]
    found = dict(zip(order, [part for theirs in returned for part in theirs], strict=True))
    return [found[i] for i in range(len(shards))]


def share_out(costs: Sequence[float], size: int) -> list[int]:
    """The rank for each of some pieces of work: the costliest first, each to the least busy rank
    (Graham's LPT rule)."""
    busy, owners = [0.0] * size, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owners[place] = min(range(size), key=lambda rank: busy[rank])
        busy[owners[place]] += costs[place]
    return owners


def _rows(shape: torch.Size, rank: int, size: int) -> torch.Size:
    """The shape of a rank's rows of a matrix, as `torch.chunk` deals them: the last ranks may have
    fewer or none."""
    most = -(-shape[0] // size)
    return torch.Size((max(0, min(most, shape[0] - rank * most)), shape[1]))


def _common_axis(parameters: Sequence[Tensor]) -> MeshAxis | None:
    axes = {sharding_axes(parameter) for parameter in parameters}
    if axes == {()}:
        return None
    if len(axes) > 1 or len(axis := next(iter(axes))) > 1 or axis[0].placement != Shard(0):
        raise ValueError("matrices are expected to be sharded alike, on dim 0 and over one axis")
    return axis[0]


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
