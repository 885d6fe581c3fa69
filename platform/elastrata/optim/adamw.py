"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): PyTorch's implementation, fused or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from elastrata.optim.base import OptimizerKeys, ParameterGroup, split_by_decay, trainable


class AdamWConfig(OptimizerKeys):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    name: Literal["adamw"] = "adamw"
    """AdamW, the default."""
    fused: bool = True
    """Whether one kernel performs the whole update, the fastest way. It rounds the last few
    elements of a tensor differently: `parallel.virtual_ranks` needs false."""

    def groups(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[ParameterGroup]:
        """Return two groups: weights, which decay, and biases and norms, which do not."""
        return split_by_decay(trainable(model), "AdamW", self.weight_decay)

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.AdamW:
        """Build PyTorch's AdamW."""
        return torch.optim.AdamW(
            [
                {"params": list(group.parameters.values()), "weight_decay": group.weight_decay}
                for group in groups
            ],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=self.fused,
            # Without the fused kernel, operator by operator: its rounding depends on no
            # neighbouring element.
            foreach=False,
        )
