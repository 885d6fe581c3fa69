"""The numbers of a transformer that its memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

_MATMUL_FLOPS = 2
_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model of equal blocks between an embedding and a head, on samples of one length."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    """Width of the feed-forward."""
    gated: bool
    """Whether the feed-forward has three matrices instead of two, as SwiGLU's."""
    causal: bool
    vocabulary: int
    """Rows of the embedding table."""
    position_rows: int
    """Of a table of learned positions; 0 without one."""
    tied: bool
    """Whether the head is the embedding."""
    block_vectors: int
    """Numbers in a block's biases and norms."""
    head_extra: int = 0
    """Parameters of the head's own matrices beside the one that gives logits."""
    predicted: float = 1.0
    """Share of the tokens that logits are computed of."""
    seq_len: int

    @property
    def kv_width(self) -> int:
        """Width of the key, and of the value."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def block_matrices(self) -> int:
        """Parameters of a block's matrices."""
        feed_forward = (3 if self.gated else 2) * self.hidden * self.feed_forward
        return 2 * self.hidden * (self.hidden + self.kv_width) + feed_forward

    @property
    def block_parameters(self) -> int:
        """All parameters of a block."""
        return self.block_matrices + self.block_vectors

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and positions."""
        return (self.vocabulary + self.position_rows) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the head that are not the embedding's."""
        return self.head_extra + (0 if self.tied else self.vocabulary * self.hidden)

    @cached_property
    def parameters(self) -> int:
        """All of them; norms outside of blocks are left out."""
        blocks = self.layers * self.block_parameters
        return blocks + self.embedding_parameters + self.head_parameters

    @cached_property
    def flops_per_sample(self) -> float:
        """Forward and backward without recomputation, attention halved where it is causal: the
        FLOPs that MFU counts."""
        attention = 2 * self.layers * self.hidden * self.seq_len * (0.5 if self.causal else 1.0)
        head = self.predicted * (self.hidden * self.vocabulary + self.head_extra)
        per_token = self.layers * self.block_matrices + attention + head
        return _MATMUL_FLOPS * _FORWARD_AND_BACKWARD * per_token * self.seq_len
