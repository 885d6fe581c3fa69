"""Clipping by bucket, inside the backward pass or after it.

The idea of clipping each bucket where its reduction is, so that it overlaps the backward pass of
the buckets still to come, is that of "Breaking MLPerf Training: optimizing BERT" (arXiv
2402.02447), which clips before the reduction (`LocalBucketClip`). The limits, the bounds and the
clipping after the reduction (`ReducedBucketClip`) are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from elastrata.parallel.fsdp_internals import DefaultReduceScatter
from elastrata.parallel.sharding import local
from elastrata.step.norms import (
    BucketNorm,
    ModelNorm,
    StageRanks,
    gradient_norm,
    gradient_norms,
    tensor_norm,
)

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


@dataclass(frozen=True)
class BlockBucket:
    """A block, which is a bucket, with its limit."""

    module: FSDPModule
    parameters: Sequence[nn.Parameter]
    limit: float


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of a model, or what a rank's stages have of them, with their limits."""

    model: nn.Module
    blocks: Sequence[BlockBucket]
    rest: Sequence[nn.Parameter]
    """The parameters of no block: one bucket, which may lie in several stages."""
    counted: Sequence[nn.Parameter]
    """Parameters of `rest` that no other stage counts."""
    rest_limit: float
    pipeline: StageRanks | None
    """The ranks that have the stages between them; None: there are none."""

    @property
    def modules(self) -> Iterator[tuple[FSDPModule, float]]:
        """The modules that are buckets, with their limits. In a pipeline the rest is in none."""
        for block in self.blocks:
            yield block.module, block.limit
        if isinstance(self.model, FSDPModule):
            yield self.model, self.rest_limit


def buckets_of(model: nn.Module, max_norm: float, pipeline: StageRanks | None = None) -> Buckets:
    """The buckets, with `bucket_limits`. Collective over the ranks of a pipeline.

    Args:
        model: as `parallelize` returned it, or this rank's stages.
        max_norm: of the whole model.
        pipeline: the ranks that have its stages between them; None: there are no stages.
    """
    modules = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    inner = [list(cast(nn.Module, module).parameters()) for module in modules]
    inside = {id(parameter) for parameters in inner for parameter in parameters}
    rest = {name: p for name, p in model.named_parameters() if id(p) not in inside}
    elsewhere = pipeline.counted_elsewhere if pipeline else ()
    counted = [p for name, p in rest.items() if name not in elsewhere]
    sizes = [_size(parameters) for parameters in inner]
    in_blocks, in_rest = sum(sizes), _size(counted)
    if pipeline is not None:
        totals = torch.tensor([in_blocks, in_rest], device=next(model.parameters()).device)
        dist.all_reduce(totals, group=pipeline.group)
        in_blocks, in_rest = totals.tolist()
    *limits, rest_limit, _ = bucket_limits([*sizes, in_rest, in_blocks - sum(sizes)], max_norm)
    return Buckets(
        model=model,
        blocks=[BlockBucket(*block) for block in zip(modules, inner, limits, strict=True)],
        rest=list(rest.values()),
        counted=counted,
        rest_limit=rest_limit,
        pipeline=pipeline,
    )


class ReducedBucketClip:
    """Clips each bucket's gradient once it is summed over the ranks, to `bucket_limits`: a `Clip`.

    Bound: a bucket is never above its limit, so the whole is never above `max_norm`. Up to
    rounding it is the same at any world size and in any layout. Costs a message of one number per
    bucket, with tensor parallelism a second one, which overlap the backward pass of the buckets
    still to come.
    """

    def __init__(self, buckets: Buckets) -> None:
        groups = _groups(_mesh(buckets.model), "shard", "tensor")
        self._norms: list[Tensor] = []
        for module, limit in buckets.modules:
            module.set_all_reduce_hook(partial(self._clip, BucketNorm(module, groups), limit))

    def before_backward(self, share: float) -> None:
        """Forgets the norms of the step before."""
        self._norms.clear()

    def after_backward(self) -> Tensor:
        """The norm before clipping, from those of the buckets."""
        return tensor_norm(torch.stack(self._norms))

    def _clip(self, measure: BucketNorm, limit: float, gradient: Tensor) -> None:
        """`gradient`: this rank's shard of a bucket, flat, summed over all ranks."""
        with record_function(RANGE):
            norm = measure(gradient)
            self._norms.append(norm)
            scale_down(gradient, norm, limit)


class LateBucketClip:
    """Clips each bucket's gradient once the backward pass is over, where `ReducedBucketClip`, which
    does so inside it, would see another gradient: a `Clip`.

    So it is where gradients of weights at zero are then taken out of it, and in a pipeline, where
    the first and the last stage have parts of one bucket, and of a tied embedding's gradient. The
    bound is that of `ReducedBucketClip`. Costs a message for each axis of the mesh, of a number for
    each bucket, and one of two numbers in a pipeline.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._device = next(buckets.model.parameters()).device

    def before_backward(self, share: float) -> None:
        """Nothing to do."""

    def after_backward(self) -> Tensor:
        """The norm before clipping, from those of the buckets."""
        blocks, pipeline = self._buckets.blocks, self._buckets.pipeline
        counted = [*(block.parameters for block in blocks), self._buckets.counted]
        norms = gradient_norms([_gradients(bucket) for bucket in counted]).to(self._device)
        squares = torch.stack([norms[:-1].square().sum(), norms[-1].square()])
        if pipeline is not None:
            dist.all_reduce(squares, group=pipeline.group)
        for block, norm in zip(blocks, norms[:-1], strict=True):
            _scale_all_down(block.parameters, norm, block.limit)
        _scale_all_down(self._buckets.rest, squares[1].sqrt(), self._buckets.rest_limit)
        return squares.sum().sqrt()


class LocalBucketClip:
    """Clips this rank's part of each bucket's gradient before it is summed, without a message; with
    tensor parallelism the part of the ranks that share their samples, with one of one number. In a
    pipeline the bucket that lies in several stages is clipped like a `LateBucketClip`. A `Clip`.

    The losses of all ranks are divided by the global weight already, so rank r's part weighs its
    share s_r, and its limit is s_r times that of `bucket_limits`. Bound: by the triangle
    inequality a bucket's sum is within sum_r s_r = 1 times its limit, so the whole is never above
    `max_norm`. Parts are noisier than their sum: the more ranks, the more is clipped.

    Raises:
        ValueError: every rank holds a whole copy of the model. FSDP2 then has no reduce-scatter,
            and offers no place before its all-reduce.
    """

    def __init__(self, buckets: Buckets) -> None:
        mesh, self._share = _mesh(buckets.model), 0.0
        groups = _groups(mesh, "tensor")
        self._norm = ModelNorm(buckets.model, gradient_norm, buckets.pipeline)
        self._rest = LateBucketClip(replace(buckets, blocks=())) if buckets.pipeline else None
        dp_size = mesh.size() // math.prod(group.size() for group in groups)
        if dp_size > 1 and mesh["shard"].size() == 1:
            raise ValueError("clip.scope: local: expected at least two workers per copy of a model")
        for module, limit in buckets.modules:
            clip = partial(self._clip, BucketNorm(module, groups), limit)
            if dp_size == 1:  # FSDP2 calls no reduce-scatter, and part and sum are the same
                module.set_all_reduce_hook(clip)
            else:
                module.set_custom_reduce_scatter(_ClippedReduceScatter(clip))

    def before_backward(self, share: float) -> None:
        """Limits this rank's parts to their share."""
        self._share = share

    def after_backward(self) -> Tensor:
        """The norm after clipping: before it, no rank knows the sum."""
        if self._rest:
            self._rest.after_backward()
        return self._norm()

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


def _scale_all_down(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    for gradient in _gradients(parameters):
        scale_down(local(gradient), norm, limit)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
