"""Clipping of a gradient whose parts lie in the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastrata.core.bucket_clip import LocalBucketClip
from elastrata.core.clip import Clip, ClipConfig
from elastrata.core.late_bucket_clip import Buckets, LateBucketClip, buckets_of
from elastrata.core.norm import gradient_norm


def build_stage_clip(
    config: ClipConfig,
    model: nn.Module,
    pipeline: dist.ProcessGroup,
    counted_elsewhere: Collection[str],
) -> Clip:
    """The clip of the gradient of a model in stages; may set hooks on them. Collective.

    Args:
        config: what to do.
        model: this rank's stages.
        pipeline: the ranks that have all of them.
        counted_elsewhere: names of parameters whose gradient another of these ranks has, too, and
            counts.

    Raises:
        ValueError: `scope=local` where every rank holds a whole copy of its stages.
    """
    max_norm = config.max_norm if config.method == "global_norm" else None
    whole = PipelineClip(model, max_norm, pipeline, counted_elsewhere)
    if config.method != "bucketwise":
        return whole
    buckets = buckets_of(
        model, config.max_norm, pipeline=pipeline, counted_elsewhere=counted_elsewhere
    )
    if config.scope == "reduced":
        return LateBucketClip(buckets)
    return LocalStageClip(model, buckets, whole)


class PipelineClip:
    """Scales the whole gradient after the backward pass, by its norm over all stages: a `Clip`.

    Args:
        model: this rank's stages.
        max_norm: the limit; None: measures only.
        group: the ranks of the pipeline.
        counted_elsewhere: names of parameters whose gradient another rank of it has, too, and
            counts.
    """

    def __init__(
        self,
        model: nn.Module,
        max_norm: float | None,
        group: dist.ProcessGroup,
        counted_elsewhere: Collection[str],
    ) -> None:
        self._parameters = list(model.parameters())
        self._counted = [
            parameter
            for name, parameter in model.named_parameters()
            if name not in counted_elsewhere
        ]
        self._max_norm = max_norm
        self._group = group

    def before_backward(self, share: float) -> None:
        """Nothing to do."""

    def after_backward(self) -> Tensor:
        """See `Clip`."""
        square = gradient_norm([p.grad for p in self._counted if p.grad is not None]).double() ** 2
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt().float()
        if self._max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                self._parameters, self._max_norm, norm, foreach=True
            )
        return norm


class LocalStageClip:
    """`LocalBucketClip` for the blocks in a pipeline's stages, `LateBucketClip` for what is left of
    the model, which lies in several of them; within the same bound.

    Args:
        model: this rank's stages.
        buckets: theirs.
        whole: measures the gradient of the whole model.

    Raises:
        ValueError: see `LocalBucketClip`.
    """

    def __init__(self, model: nn.Module, buckets: Buckets, whole: PipelineClip) -> None:
        blocks = [(block.module, block.limit) for block in buckets.blocks]
        self._blocks = LocalBucketClip(model, blocks)
        self._rest = LateBucketClip(replace(buckets, blocks=()))
        self._whole = whole

    def before_backward(self, share: float) -> None:
        """See `Clip`."""
        self._blocks.before_backward(share)

    def after_backward(self) -> Tensor:
        """See `Clip`. The norm after clipping."""
        self._rest.after_backward()
        return self._whole.after_backward()
