"""The 2-norm of a bucket of gradients, flat as FSDP2 reduces it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastrata.core.norm import tensor_norm


class BucketNorm:
    """The norm of a bucket's gradient over some ranks, a float64 scalar; collective where there are
    other ranks.

    With tensor parallelism the ranks of a group have parts of some tensors and the whole of others,
    with equal gradients: of the squares of these each rank counts its share.

    Args:
        module: the bucket.
        groups: the ranks that have other parts of it, axis by axis of the mesh.
    """

    def __init__(self, module: FSDPModule, groups: Sequence[dist.ProcessGroup]) -> None:
        runs = groupby(_tensors(module), itemgetter(1))
        self._runs = [(sum(size for size, _ in run), share) for share, run in runs]
        self._groups = groups

    def __call__(self, gradient: Tensor) -> Tensor:
        """Of one or more shards of the bucket, one after the other.

        Args:
            gradient: shape [number of shards * shard].
        """
        sizes = [size for size, _ in self._runs]
        parts = torch.split(gradient.view(-1, sum(sizes)), sizes, dim=1)
        squares = [
            tensor_norm(part).square() * share
            for part, (_, share) in zip(parts, self._runs, strict=True)
        ]
        square = torch.stack(squares).sum()
        for group in self._groups:
            dist.all_reduce(square, group=group)
        return square.sqrt()


def _tensors(module: FSDPModule) -> Iterator[tuple[int, float]]:
    """For every tensor of the bucket, in its order: the numbers in a shard, padding included, and
    the share of this rank in its norm."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group else ():
        yield parameter.padded_sharded_param_size.numel(), _share(parameter.sharded_param)


def _share(parameter: Tensor) -> float:
    if not isinstance(parameter, DTensor):
        return 1.0
    mesh = parameter.device_mesh
    if "tensor" not in (names := mesh.mesh_dim_names or ()):
        return 1.0
    axis = names.index("tensor")
    return 1 / mesh.size(axis) if parameter.placements[axis].is_replicate() else 1.0
