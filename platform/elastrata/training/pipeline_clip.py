"""Clipping of a gradient whose parts lie in the stages of a pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastrata.training.norm import gradient_norm


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
        counted_elsewhere: tuple[str, ...],
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
