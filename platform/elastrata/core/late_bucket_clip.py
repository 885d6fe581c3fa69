"""Clipping by bucket, after the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from elastrata.core.bucket_clip import bucket_limits, scale_down
from elastrata.core.norm import gradient_norms
from elastrata.core.optimizers.sharding import local


@dataclass(frozen=True)
class Block:
    """A block, which is a bucket, with its limit."""

    module: FSDPModule
    parameters: Sequence[nn.Parameter]
    limit: float


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of a model, or what a rank's stages have of them, with their limits."""

    blocks: Sequence[Block]
    rest: Sequence[nn.Parameter]
    """What is in no block: one bucket, which may lie in several stages."""
    counted: Sequence[nn.Parameter]
    """Those of `rest` that no other stage counts."""
    rest_limit: float
    pipeline: dist.ProcessGroup | None
    """The ranks that have the stages between them; None: there are none."""
    device: torch.device


def buckets_of(
    model: nn.Module,
    max_norm: float,
    *,
    pipeline: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[str] = (),
) -> Buckets:
    """The buckets, with `bucket_limits`. Collective over the ranks of a pipeline.

    Args:
        model: as `parallelize` returned it, or this rank's stages.
        max_norm: of the whole model.
        pipeline: the ranks that have its stages between them; None: there are no stages.
        counted_elsewhere: names of parameters that another of these ranks has, too, and counts.
    """
    modules = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    inner = [list(cast(nn.Module, module).parameters()) for module in modules]
    inside = {id(parameter) for parameters in inner for parameter in parameters}
    rest = {name: p for name, p in model.named_parameters() if id(p) not in inside}
    counted = [p for name, p in rest.items() if name not in counted_elsewhere]
    sizes, device = [_size(parameters) for parameters in inner], next(model.parameters()).device
    told = torch.tensor([sum(sizes), _size(counted)], device=device)
    if pipeline is not None:
        dist.all_reduce(told, group=pipeline)
    in_blocks, in_rest = told.tolist()
    *limits, rest_limit, _ = bucket_limits([*sizes, in_rest, in_blocks - sum(sizes)], max_norm)
    return Buckets(
        blocks=[Block(*block) for block in zip(modules, inner, limits, strict=True)],
        rest=list(rest.values()),
        counted=counted,
        rest_limit=rest_limit,
        pipeline=pipeline,
        device=device,
    )


class LateBucketClip:
    """Clips each bucket's gradient once the backward pass is over: what `ReducedBucketClip` does
    inside it, where the sum over the ranks is not yet what is to be clipped.

    So it is where gradients of weights at zero are then taken out of it, and in a pipeline, where
    the first and the last stage have parts of one bucket, and of a tied embedding's gradient. The
    bound is that of `ReducedBucketClip`. Costs a message for each axis of the mesh, of a number for
    each bucket, and one of two numbers in a pipeline.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def before_backward(self, share: float) -> None:
        """Nothing to do."""

    def after_backward(self) -> Tensor:
        """See `Clip`. The norm before clipping, from those of the buckets."""
        blocks = self._buckets.blocks
        mine = [*(block.parameters for block in blocks), self._buckets.counted]
        norms = gradient_norms([_gradients(some) for some in mine]).to(self._buckets.device)
        squares = torch.stack([norms[:-1].square().sum(), norms[-1].square()])
        if self._buckets.pipeline is not None:
            dist.all_reduce(squares, group=self._buckets.pipeline)
        for block, norm in zip(blocks, norms[:-1], strict=True):
            _scale_down(block.parameters, norm, block.limit)
        _scale_down(self._buckets.rest, squares[1].sqrt(), self._buckets.rest_limit)
        return squares.sum().sqrt()


def _scale_down(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    for gradient in _gradients(parameters):
        scale_down(local(gradient), norm, limit)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
