"""The feed-forwards of blocks: of two matrices, or gated, of three."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["gelu", "gelu_tanh", "geglu", "swiglu"]
_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "geglu": F.gelu,
    "swiglu": F.silu,
}
"""What is applied to the inner numbers, or to the gate (Hendrycks and Gimpel 2016,
arXiv 1606.08415; Shazeer 2020, arXiv 2002.05202)."""


def is_gated(activation: Activation) -> bool:
    """Whether the feed-forward has a third matrix, whose outputs the others are multiplied by."""
    return activation.endswith("glu")


def feed_forward(
    hidden_size: int, intermediate_size: int, *, activation: Activation, bias: bool
) -> FeedForward | GatedFeedForward:
    """The module with that activation."""
    kind = GatedFeedForward if is_gated(activation) else FeedForward
    return kind(hidden_size, intermediate_size, _FUNCTIONS[activation], bias=bias)


class FeedForward(nn.Module):
    """Wider, through the activation, and back."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape [T, E] to [T, E]."""
        out: Tensor = self.down(self.activation(self.up(hidden)))
        return out


class GatedFeedForward(nn.Module):
    """The same with a gate: the activation is applied to that alone."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape [T, E] to [T, E]."""
        out: Tensor = self.down(self.activation(self.gate(hidden)) * self.up(hidden))
        return out
