"""A transformer block: self-attention and a feed-forward of two matrices, or three if gated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from elastrata_workloads.unpadded.attention import ProjectedAttention
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.dropout import HiddenDropout
from elastrata_workloads.unpadded.shapes import Activation, BlockShape

FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "geglu": F.gelu,
    "swiglu": F.silu,
}
"""Functions applied to the inner activations, or to the gate (Hendrycks and Gimpel 2016, arXiv
1606.08415; Shazeer 2020, arXiv 2002.05202)."""


class FeedForward(nn.Module):
    """Feed-forward layer; if gated, the activation function is applied only to the gate."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        hidden, inner = shape.attention.hidden_size, shape.intermediate_size
        self.activation = FUNCTIONS[shape.activation]
        self.gate = nn.Linear(hidden, inner, bias=shape.bias) if shape.gated else None
        self.up = nn.Linear(hidden, inner, bias=shape.bias)
        self.down = nn.Linear(inner, hidden, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape [T, E] to [T, E]."""
        if self.gate is None:
            inner = self.activation(self.up(hidden))
        else:
            inner = self.activation(self.gate(hidden)) * self.up(hidden)
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        hidden = shape.attention.hidden_size
        # Without `normed_input`, the embeddings already end with a norm.
        self.attention_norm = shape.norm.over(hidden) if shape.normed_input else nn.Identity()
        self.attention = ProjectedAttention(shape.attention)
        self.attention_dropout = HiddenDropout(shape.attention_dropout, site=1)
        self.feed_forward_norm = shape.norm.over(hidden)
        self.feed_forward = FeedForward(shape)
        self.feed_forward_dropout = HiddenDropout(shape.feed_forward_dropout, site=2)

    def forward(
        self, hidden: Tensor, segments: Segments, positions: Tensor, dropout_keys: Tensor | None
    ) -> Tensor:
        """Map shape [T, E] to [T, E]; positions have shape [T]."""
        attended = self.attention(self.attention_norm(hidden), segments, positions)
        hidden = hidden + self.attention_dropout(attended, dropout_keys)
        transformed = self.feed_forward(self.feed_forward_norm(hidden))
        out: Tensor = hidden + self.feed_forward_dropout(transformed, dropout_keys)
        return out
