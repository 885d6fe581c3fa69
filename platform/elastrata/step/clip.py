"""Gradient clipping: the configuration and the whole-gradient clip."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from elastrata.config import Config
from elastrata.parallel.sharding import local
from elastrata.step.bucket_clip import (
    LateBucketClip,
    LocalBucketClip,
    ReducedBucketClip,
    build_buckets,
)
from elastrata.step.norms import (
    Measure,
    ModelNorm,
    StageRanks,
    gradient_norm,
    reproducible_norm,
)

_EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as PyTorch does."""


class ClipConfig(Config):
    """Gradient clipping, before the optimizer's step."""

    only_with: ClassVar = {"scope": ("method", "bucketwise")}

    method: Literal["global_norm", "bucketwise", "none"] = "global_norm"
    """global_norm: scale the gradient down if its 2-norm exceeds `max_norm`. bucketwise: scale each
    bucket (a block, or the rest) down if it exceeds its part of `max_norm`, during the backward
    pass, or after it with sparsity, a pipeline or `parallel.gradient_sync` other than step."""
    max_norm: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    """Maximum 2-norm of the whole gradient; not used with none."""
    scope: Literal["reduced", "local"] = "reduced"
    """For bucketwise. reduced: clip the sum over workers; the same at any number of workers. local:
    clip each worker's part before the sum, without a message; losses depend on the number of
    workers."""


class Clip(Protocol):
    """Clips the gradient of one step, during or after its backward passes."""

    def before_backward(self, share: float) -> None:
        """Prepare for a step, before its first backward pass.

        Args:
            share: this rank's share of the weight of the global batch. The shares of all ranks add
                up to 1.
        """

    def after_backward(self) -> Tensor:
        """Finish clipping and return the 2-norm of the global batch's gradient, a scalar.

        The norm is that before clipping, or after it with `scope=local`. It is not finite if the
        gradient of any rank is not. Collective; all ranks return the same value.
        """


def build_clip(
    config: ClipConfig,
    model: nn.Module,
    *,
    ordered: bool = False,
    late: bool = False,
    pipeline: StageRanks | None = None,
) -> Clip:
    """Build the clip of a model's gradient. Collective over the ranks of a pipeline.

    The clip may register hooks on the model.

    Args:
        config: the method and its limit.
        model: as `parallelize` returned it, or this rank's stages.
        ordered: whether the norm must be equal to the bit for every sharding; not with bucketwise.
        late: whether the gradient is final only after all backward passes, because gradients are
            zeroed or sums of micro-batches added afterwards; not with `scope=local`.
        pipeline: ranks of the pipeline; None without one.

    Raises:
        ValueError: `scope=local` with a whole copy of the model, or of its stages, on every rank.
    """
    if config.method != "bucketwise":
        # With `none` the norm is still measured, for the step's record.
        max_norm = config.max_norm if config.method == "global_norm" else None
        measure = reproducible_norm if ordered else gradient_norm
        return WholeClip(model, max_norm, measure, pipeline)
    buckets = build_buckets(model, config.max_norm, pipeline)
    if config.scope == "local":
        return LocalBucketClip(buckets)
    # The early clip overlaps its messages with the backward pass, so it is preferred.
    return LateBucketClip(buckets) if late or pipeline else ReducedBucketClip(buckets)


class WholeClip:
    """Scales the whole gradient by its norm after the backward pass.

    Args:
        model: this rank's model or stages.
        max_norm: the limit; None: only measure the norm.
        measure: computes the norm of the gradients of this rank's stages.
        pipeline: ranks of the pipeline; None without one.
    """

    def __init__(
        self,
        model: nn.Module,
        max_norm: float | None,
        measure: Measure,
        pipeline: StageRanks | None = None,
    ) -> None:
        self._parameters = list(model.parameters())
        self._max_norm = max_norm
        self._norm = ModelNorm(model, measure, pipeline)

    def before_backward(self, share: float) -> None:
        """Do nothing."""

    def after_backward(self) -> Tensor:
        """Scale the gradient and return its norm before clipping."""
        norm = self._norm()
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        if self._max_norm is not None and gradients:
            # Local shards: `torch.nn.utils.clip_grads_with_norm_` computes the same on DTensors,
            # which took a seventh of a rehearsal's time on a mesh of three axes.
            scale = torch.clamp(self._max_norm / (norm + _EPSILON), max=1.0)
            torch._foreach_mul_(gradients, scale)
        return norm
