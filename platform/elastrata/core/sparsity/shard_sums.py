"""Sums over the shards of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from elastrata.core.optimizers.sharding import MeshAxis, sharding_axes


def sums_over_shards(matrices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Adds up what ranks have found in their shards; the same on all of them.

    Collective over the axes that shard the matrices, one message for each.

    Args:
        matrices: say how they are sharded; their values do not matter.
        values: shape [matrices, n], of this rank's shards; changed.
    """
    rows: dict[MeshAxis, list[int]] = {}
    for place, matrix in enumerate(matrices):
        for axis in sharding_axes(matrix):
            rows.setdefault(axis, []).append(place)
    for axis, places in rows.items():
        part = values[places]
        dist.all_reduce(part, group=axis.group)
        values[places] = part
    return values
