"""Clipping by bucket, during the backward pass or after it.

"Breaking MLPerf Training: optimizing BERT" (arXiv 2402.02447) clips each bucket before its
reduction, which overlaps with the backward pass of the remaining buckets (`LocalBucketClip`). The
limits, the bounds and clipping after the reduction (`ReducedBucketClip`) are new in this project.
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
"""Name of one bucket's clipping in a profile."""
_ROOM = 1e-6
"""Gradients are scaled to this share below the limit: fp32 rounds a product by up to 6e-8 of it."""


def bucket_limits(num_parameters: Sequence[int], max_norm: float) -> list[float]:
    """Return the limit of each bucket's 2-norm, in proportion to the root of its number of
    parameters.

    The squares of the limits add up to `max_norm` squared, so the whole gradient stays within
    `max_norm` if every bucket stays within its limit. A gradient with elements of equal mean size
    is scaled as `global_norm` would scale it. The limit of a part of the model does not depend on
    the number of buckets that it is divided into.
    """
    total = sum(num_parameters)
    return [max_norm * math.sqrt(number / total) for number in num_parameters]


def scale_down(gradient: Tensor, norm: Tensor, limit: float) -> None:
    """Scale a gradient in place to the 2-norm `limit` if `norm` exceeds it; otherwise change no
    bit.

    Values that are not finite remain so: NaN is not above any limit, and infinity times zero is
    NaN.
    """
    # `where` instead of a branch, so that the host need not read the norm from the device.
    gradient.mul_(torch.where(norm > limit, limit * (1 - _ROOM) / norm, 1.0))


@dataclass(frozen=True)
class BlockBucket:
    """A block of the model as one bucket, with its limit."""

    module: FSDPModule
    parameters: Sequence[nn.Parameter]
    limit: float


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of a model, or of a rank's pipeline stages, with their limits."""

    model: nn.Module
    blocks: Sequence[BlockBucket]
    rest: Sequence[nn.Parameter]
    """Parameters outside of all blocks: one bucket, which several stages may share."""
    counted: Sequence[nn.Parameter]
    """Parameters of `rest` that this rank's stages count, so that each counts once."""
    rest_limit: float
    pipeline: StageRanks | None
    """Ranks of the pipeline; None without one."""

    @property
    def modules(self) -> Iterator[tuple[FSDPModule, float]]:
        """Yield the modules that are buckets, with their limits. In a pipeline, no module is the
        rest."""
        for block in self.blocks:
            yield block.module, block.limit
        if isinstance(self.model, FSDPModule):
            yield self.model, self.rest_limit


def build_buckets(model: nn.Module, max_norm: float, pipeline: StageRanks | None = None) -> Buckets:
    """Return the model's buckets with their `bucket_limits`. Collective over the ranks of a
    pipeline.

    Args:
        model: as `parallelize` returned it, or this rank's stages.
        max_norm: limit of the whole model's norm.
        pipeline: ranks of the pipeline; None without one.
    """
    modules = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    inner = [list(cast(nn.Module, module).parameters()) for module in modules]
    inside = {id(parameter) for parameters in inner for parameter in parameters}
    rest = {name: p for name, p in model.named_parameters() if id(p) not in inside}
    # A tied embedding is in two stages and must count once.
    elsewhere = pipeline.counted_elsewhere if pipeline else ()
    counted = [p for name, p in rest.items() if name not in elsewhere]
    sizes = [_size(parameters) for parameters in inner]
    in_blocks, in_rest = sum(sizes), _size(counted)
    if pipeline is not None:
        # Every rank only knows the sizes of its stages.
        totals = torch.tensor([in_blocks, in_rest], device=next(model.parameters()).device)
        dist.all_reduce(totals, group=pipeline.group)
        in_blocks, in_rest = totals.tolist()
    # The last number stands for the blocks of other stages, so that the limits are those of the
    # whole model.
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
    """A `Clip` that scales each bucket to its limit as soon as it is summed over the ranks.

    No bucket exceeds its limit, so the whole gradient never exceeds `max_norm`. Up to rounding, the
    result is the same at any world size and in any layout. Each bucket costs a message of one
    number, and a second one with tensor parallelism. These messages overlap with the backward pass
    of the remaining buckets.
    """

    def __init__(self, buckets: Buckets) -> None:
        groups = _groups(_mesh(buckets.model), "shard", "tensor")
        self._norms: list[Tensor] = []
        for module, limit in buckets.modules:
            # FSDP2 calls this hook with the reduced shard, after the all-reduce of HSDP.
            module.set_all_reduce_hook(partial(self._clip, BucketNorm(module, groups), limit))

    def before_backward(self, share: float) -> None:
        """Forget the norms of the previous step."""
        self._norms.clear()

    def after_backward(self) -> Tensor:
        """Return the norm before clipping, computed from the norms of the buckets."""
        return tensor_norm(torch.stack(self._norms))

    def _clip(self, measure: BucketNorm, limit: float, gradient: Tensor) -> None:
        """Clip this rank's shard of a bucket: flat, and already summed over all ranks."""
        with record_function(RANGE):
            norm = measure(gradient)
            self._norms.append(norm)
            scale_down(gradient, norm, limit)


class LateBucketClip:
    """A `Clip` that scales each bucket to its limit after the backward pass.

    It replaces `ReducedBucketClip` if the gradient is not final during the backward pass: if
    gradients of masked weights are zeroed afterwards, or in a pipeline, whose first and last stage
    share a bucket and the gradient of a tied embedding. The bound is that of `ReducedBucketClip`.
    It costs one message per mesh axis, of one number per bucket, and in a pipeline another one of
    two numbers.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._device = next(buckets.model.parameters()).device

    def before_backward(self, share: float) -> None:
        """Do nothing."""

    def after_backward(self) -> Tensor:
        """Clip all buckets and return the norm before clipping."""
        blocks, pipeline = self._buckets.blocks, self._buckets.pipeline
        counted = [*(block.parameters for block in blocks), self._buckets.counted]
        norms = gradient_norms([_gradients(bucket) for bucket in counted]).to(self._device)
        squares = torch.stack([norms[:-1].square().sum(), norms[-1].square()])
        if pipeline is not None:
            # A block belongs to one stage, so only the sum of squares and the shared bucket need a
            # message.
            dist.all_reduce(squares, group=pipeline.group)
        for block, norm in zip(blocks, norms[:-1], strict=True):
            _scale_all_down(block.parameters, norm, block.limit)
        # All of them, including those that another stage counts: their gradients are copies.
        _scale_all_down(self._buckets.rest, squares[1].sqrt(), self._buckets.rest_limit)
        return squares.sum().sqrt()


class LocalBucketClip:
    """A `Clip` that scales this rank's part of each bucket before the sum over ranks, without a
    message.

    With tensor parallelism the part is that of the ranks that share their samples, at the cost of a
    message of one number. In a pipeline, the bucket that several stages share is clipped as by
    `LateBucketClip`.

    The losses of all ranks are already divided by the global weight. The part of rank r therefore
    has its share s_r of the weight, and its limit is s_r times that of `bucket_limits`. By the
    triangle inequality the sum of a bucket stays within sum_r s_r = 1 times its limit, so the whole
    gradient never exceeds `max_norm`. Parts are noisier than their sum, so more is clipped at more
    ranks.

    Raises:
        ValueError: every rank has a whole copy of the model. FSDP2 then runs no reduce-scatter, and
            has no hook before its all-reduce.
    """

    def __init__(self, buckets: Buckets) -> None:
        mesh, self._share = _mesh(buckets.model), 0.0
        groups = _groups(mesh, "tensor")
        # Only for the record: clipping itself does not use it.
        self._norm = ModelNorm(buckets.model, gradient_norm, buckets.pipeline)
        self._rest = LateBucketClip(replace(buckets, blocks=())) if buckets.pipeline else None
        dp_size = mesh.size() // math.prod(group.size() for group in groups)
        if dp_size > 1 and mesh["shard"].size() == 1:
            # Raised here instead of by the recipe's checks, as it depends on the number of workers.
            raise ValueError("clip.scope: local: expected at least two workers per copy of a model")
        for module, limit in buckets.modules:
            clip = partial(self._clip, BucketNorm(module, groups), limit)
            # FSDP2 runs no reduce-scatter on a single rank, and the part is the sum.
            if dp_size == 1:
                module.set_all_reduce_hook(clip)
            else:
                module.set_custom_reduce_scatter(_ClippedReduceScatter(clip))

    def before_backward(self, share: float) -> None:
        """Set this rank's share of the limits."""
        self._share = share

    def after_backward(self) -> Tensor:
        """Return the norm after clipping: no rank knows the sum before it."""
        if self._rest:
            self._rest.after_backward()
        return self._norm()

    def _clip(self, measure: BucketNorm, limit: float, gradient: Tensor) -> None:
        """Clip this rank's part of a bucket: flat, and summed over its micro-batches."""
        with record_function(RANGE):
            scale_down(gradient, measure(gradient), limit * self._share)


class _ClippedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter of one bucket, which clips its input first."""

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
    """Return the mesh that shards the model's parameters."""
    return next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))


def _groups(mesh: DeviceMesh, *axes: str) -> list[dist.ProcessGroup]:
    """Return this rank's group along each of those axes that the mesh has."""
    return [mesh.get_group(axis) for axis in axes if axis in (mesh.mesh_dim_names or ())]


def _scale_all_down(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    for gradient in _gradients(parameters):
        scale_down(local(gradient), norm, limit)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
