"""Self-attention: projections to heads, and the attention between them.

Shapes: T tokens of the micro-batch, H heads, K heads of key and value, D = E / H, E hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import override

from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.rotary import rotated
from elastrata_workloads.unpadded.shapes import AttentionShape


class SelfAttention(nn.Module):
    """Projections to query, key and value, and the attention between them."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size, bias=shape.bias)
        self.key = nn.Linear(shape.hidden_size, shape.kv_width, bias=shape.bias)
        self.value = nn.Linear(shape.hidden_size, shape.kv_width, bias=shape.bias)
        norm = shape.head_norm
        self.query_norm = norm.over(shape.head_size) if norm else None
        self.key_norm = norm.over(shape.head_size) if norm else None

    def forward(
        self, hidden: Tensor, segments: Segments, positions: Tensor | None = None
    ) -> Tensor:
        """Shape [T, E] to [T, E]; positions of shape [T] where queries and keys are turned."""
        # -1: under tensor parallelism a rank holds some of the heads only.
        heads = (-1, self.shape.head_size)
        query = self.query(hidden).unflatten(-1, heads)
        key = self.key(hidden).unflatten(-1, heads)
        value = self.value(hidden).unflatten(-1, heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.shape.rotary_base is not None and positions is not None:
            query = rotated(query, positions, self.shape.rotary_base)
            key = rotated(key, positions, self.shape.rotary_base)
        attended = attention(
            query,
            key,
            value,
            segments,
            self.shape.kernel,
            causal=self.shape.causal,
            window=self.shape.window,
        )
        return attended.flatten(-2)


class ProjectedAttention(SelfAttention):
    """Self-attention with its output projection."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size, bias=shape.bias)

    @override
    def forward(
        self, hidden: Tensor, segments: Segments, positions: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.output(super().forward(hidden, segments, positions))
        return out
