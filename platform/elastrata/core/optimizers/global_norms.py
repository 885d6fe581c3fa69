"""Norms of whole tensors from shards, all in one reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elastrata.core.optimizers.sharding import MeshAxis, sharding_axes


def global_norms(parameters: Sequence[Tensor], *shards: Sequence[Tensor]) -> Tensor:
    """The 2-norms of tensors that are sharded as `parameters` are.

    Collective over the axes that shard them: one all-reduce per axis, however many tensors there
    are, so one under FSDP and, inside each replica, one under HSDP; one more with tensor
    parallelism, of the tensors that it divides.

    Args:
        parameters: say how the tensors are sharded; their values do not matter.
        shards: this rank's part of one tensor per parameter, maybe empty; one or more such lists.

    Returns:
        Shape [number of lists, number of parameters], float64.
    """
    norms = [torch.stack(torch._foreach_norm(list(part))) for part in shards]
    squares = torch.stack(norms).double().square()
    columns: dict[MeshAxis, list[int]] = {}
    for place, parameter in enumerate(parameters):
        for axis in sharding_axes(parameter):
            columns.setdefault(axis, []).append(place)
    for axis, places in columns.items():
        part = squares[:, places]
        dist.all_reduce(part, group=axis.group)
        squares[:, places] = part
    return squares.sqrt()
