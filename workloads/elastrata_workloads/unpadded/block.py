"""A block of a transformer with a norm before each of its halves.

Shapes: T tokens of the micro-batch, E hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.dropout import HiddenDropout
from elastrata_workloads.unpadded.feed_forward import feed_forward
from elastrata_workloads.unpadded.self_attention import ProjectedAttention
from elastrata_workloads.unpadded.shapes import BlockShape


class Block(nn.Module):
    """Attention, then feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        hidden = shape.attention.hidden_size
        self.attention_norm = shape.norm.over(hidden) if shape.normed_input else nn.Identity()
        self.attention = ProjectedAttention(shape.attention)
        self.attention_dropout = HiddenDropout(shape.attention_dropout, site=1)
        self.feed_forward_norm = shape.norm.over(hidden)
        self.feed_forward = feed_forward(
            hidden, shape.intermediate_size, activation=shape.activation, bias=shape.bias
        )
        self.feed_forward_dropout = HiddenDropout(shape.feed_forward_dropout, site=2)

    def forward(
        self, hidden: Tensor, segments: Segments, positions: Tensor, dropout_keys: Tensor | None
    ) -> Tensor:
        """Shape [T, E] to [T, E]; positions of shape [T]."""
        attended = self.attention(self.attention_norm(hidden), segments, positions)
        hidden = hidden + self.attention_dropout(attended, dropout_keys)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        out: Tensor = hidden + self.feed_forward_dropout(fed, dropout_keys)
        return out
