"""Clipping by bucket, inside the backward pass.

The idea of clipping each bucket where its reduction is, so that it overlaps the backward pass of
the buckets still to come, is that of "Breaking MLPerf Training: optimizing BERT" (arXiv
2402.02447), which clips before the reduction (`LocalBucketClip`). The limits, the bounds and the
clipping after the reduction (`ReducedBucketClip`) are ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from elastrata.core.bucket_norm import BucketNorm
from elastrata.core.fsdp_internals import DefaultReduceScatter
from elastrata.core.norm import gradient_norm, tensor_norm

RANGE = "elastrata::clip_bucket"
"""The name in a profile of the clipping of one bucket."""
_ROOM = 1e-6
"""Clipped to this share below the limit: fp32 rounds a product by up to 6e-8 of it."""


def bucket_limits(num_parameters: Sequence[int], max_norm: float) -> list[float]:
    """The limits of the buckets' 2-norms: in proportion to the root of their parameters.

    Their squares add up to `max_norm` squared, so buckets within them make a gradient within
    `max_norm`. A gradient of one mean size everywhere is scaled as `global_norm` would, and what
    a part of the model may have does not depend on how finely it is cut into buckets.
    """
    total = sum(num_parameters)
    return [max_norm * math.sqrt(number / total) for number in num_parameters]


def scale_down(gradient: Tensor, norm: Tensor, limit: float) -> None:
    """Scales in place to a 2-norm of `limit`, where it is above; else changes no bit.

    What is not finite stays so: NaN is not above any limit, and infinity times zero is NaN.
    """
    gradient.mul_(torch.where(norm > limit, limit * (1 - _ROOM) / norm, 1.0))


class ReducedBucketClip:
    """Clips each bucket's gradient once it is summed over the ranks, to `bucket_limits`.

    Bound: a bucket is never above its limit, so the whole is never above `max_norm`. Up to
    rounding it is the same at any world size and in any layout. Costs a message of one number per
    bucket, with tensor parallelism a second one, which overlap the backward pass of the buckets
    still to come.
    """

    def __init__(self, model: nn.Module, max_norm: float) -> None:
        groups = _groups(_mesh(model), "shard", "tensor")
        self._norms: list[Tensor] = []
        for module, limit in limited_buckets(model, max_norm):
            module.set_all_reduce_hook(partial(self._clip, BucketNorm(module, groups), limit))

    def before_backward(self, share: float) -> None:
        """See `Clip`."""
        self._norms.clear()

    def after_backward(self) -> Tensor:
        """See `Clip`. The norm before clipping, from those of the buckets."""
        return tensor_norm(torch.stack(self._norms))

    def _clip(self, measure: BucketNorm, limit: float, gradient: Tensor) -> None:
        """`gradient`: this rank's shard of a bucket, flat, summed over all ranks."""
        with record_function(RANGE):
            norm = measure(gradient)
            self._norms.append(norm)
            scale_down(gradient, norm, limit)


class LocalBucketClip:
    """Clips this rank's part of each bucket's gradient before it is summed, without a message; with
    tensor parallelism the part of the ranks that share their samples, with one of one number.

    The losses of all ranks are divided by the global weight already, so rank r's part weighs its
    share s_r, and its limit is s_r times that of `bucket_limits`. Bound: by the triangle
    inequality a bucket's sum is within sum_r s_r = 1 times its limit, so the whole is never above
    `max_norm`. Parts are noisier than their sum: the more ranks, the more is clipped.

    Args:
        model: as `parallelize` returned it.
        buckets: those of its modules that are clipped, with their limits.

    Raises:
        ValueError: every rank holds a whole copy of the model. FSDP2 then has no reduce-scatter,
            and offers no place before its all-reduce.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[tuple[FSDPModule, float]]) -> None:
        mesh, self._share = _mesh(model), 0.0
        groups = _groups(mesh, "tensor")
        self._parameters = list(model.parameters())
        dp_size = mesh.size() // math.prod(group.size() for group in groups)
        if dp_size > 1 and mesh["shard"].size() == 1:
            raise ValueError("clip.scope: local: expected at least two workers per copy of a model")
        for module, limit in buckets:
            clip = partial(self._clip, BucketNorm(module, groups), limit)
            if dp_size == 1:  # FSDP2 calls no reduce-scatter, and part and sum are the same
                module.set_all_reduce_hook(clip)
            else:
                module.set_custom_reduce_scatter(_ClippedReduceScatter(clip))

    def before_backward(self, share: float) -> None:
        """See `Clip`."""
        self._share = share

    def after_backward(self) -> Tensor:
        """See `Clip`. The norm after clipping: before it, no rank knows the sum."""
        return gradient_norm([p.grad for p in self._parameters if p.grad is not None])

    def _clip(self, measure: BucketNorm, limit: float, gradient: Tensor) -> None:
        """`gradient`: this rank's part of a bucket, flat, of all its micro-batches."""
        with record_function(RANGE):
            scale_down(gradient, measure(gradient), limit * self._share)


class _ClippedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter of one bucket, with its input clipped before."""

    def __init__(self, clip: Callable[[Tensor], None]) -> None:
        self._clip = clip

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._clip(input_tensor)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _mesh(model: nn.Module) -> DeviceMesh:
    """The mesh that shards the model's parameters."""
    return next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))


def _groups(mesh: DeviceMesh, *axes: str) -> list[dist.ProcessGroup]:
    """The ranks along each of these axes that the mesh has."""
    return [mesh.get_group(axis) for axis in axes if axis in (mesh.mesh_dim_names or ())]


def limited_buckets(model: nn.Module, max_norm: float) -> Iterator[tuple[FSDPModule, float]]:
    """Every module that is a bucket, with its limit: its own parameters less those of the buckets
    inside it."""
    owners: dict[nn.Parameter, FSDPModule] = {}
    for module in model.modules():  # outer ones first
        if isinstance(module, FSDPModule):
            owners.update(dict.fromkeys(module.parameters(), module))
    sizes = Counter[FSDPModule]()
    for parameter, owner in owners.items():
        sizes[owner] += parameter.numel() if parameter.requires_grad else 0
    yield from zip(sizes, bucket_limits(list(sizes.values()), max_norm), strict=True)
