"""The norm of a model: which kind, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

Norm = Literal["layer", "rms"]


@dataclass(frozen=True, kw_only=True)
class NormShape:
    """LayerNorm, or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), which has no bias."""

    kind: Norm = "layer"
    eps: float
    """Added to variances, or mean squares, before the square root."""
    bias: bool = True
    """Whether a LayerNorm has one."""

    def over(self, size: int) -> nn.LayerNorm | nn.RMSNorm:
        """A norm over so many features."""
        if self.kind == "rms":
            return nn.RMSNorm(size, eps=self.eps)
        return nn.LayerNorm(size, eps=self.eps, bias=self.bias)

    def numbers(self, size: int) -> int:
        """Parameters of a norm over so many features."""
        return size * (2 if self.kind == "layer" and self.bias else 1)
