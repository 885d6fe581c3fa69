"""The numbers that fix a block and its self-attention; without torch's compiler, so that drivers
can know them."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata_workloads.unpadded.feed_forward import Activation, is_gated
from elastrata_workloads.unpadded.kernel import Kernel
from elastrata_workloads.unpadded.norm import NormShape


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Everything that fixes a self-attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Heads of key and value, a divisor of `num_heads`."""
    bias: bool
    """Whether projections have one."""
    causal: bool
    """Whether a token attends to itself and those before it only."""
    window: int | None = None
    """Tokens to each side that a token attends to at most; None: all of its segment."""
    rotary_base: float | None = None
    """Of the angles that queries and keys are turned by; None: they are not."""
    head_norm: NormShape | None = None
    """Of every head's query and key; None: they have none."""
    kernel: Kernel

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of the key, and of the value."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Everything that fixes a block's parameters and how they are applied."""

    attention: AttentionShape
    intermediate_size: int
    activation: Activation
    bias: bool
    """Whether the feed-forward's matrices have one."""
    norm: NormShape
    normed_input: bool = True
    """Whether there is a norm before attention: not where the embeddings have just had one."""
    attention_dropout: float
    """Of attention's output."""
    feed_forward_dropout: float

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has three matrices."""
        return is_gated(self.activation)

    @property
    def vectors(self) -> int:
        """Numbers in biases and norms, with one before each half."""
        shape, hidden = self.attention, self.attention.hidden_size
        of_heads = 2 * shape.head_norm.numbers(shape.head_size) if shape.head_norm else 0
        of_attention = 2 * hidden + 2 * shape.kv_width if shape.bias else 0
        inner = (2 if self.gated else 1) * self.intermediate_size
        of_feed_forward = hidden + inner if self.bias else 0
        return of_heads + of_attention + of_feed_forward + 2 * self.norm.numbers(hidden)
