"""Sizes and options of a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastrata.workload.model_spec import ModelSpec
from elastrata_workloads.unpadded.shapes import (
    AttentionShape,
    BlockShape,
    Kernel,
    Norm,
    NormShape,
    RotaryScaling,
)

Positions = Literal["learned", "rotary"]
Activation = Literal["gelu", "swiglu"]
Bias = bool | Literal["qkv", "attention"]
"""Projections that have biases: all or none, those to query, key and value, or attention's four."""


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """Sizes and options that define the model's parameters and computation."""

    num_ids: int
    """Number of real ids; the model has a logit for each."""
    num_embeddings: int
    """Rows of the embedding table, at least `num_ids`."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    """Width of a head."""
    intermediate_size: int
    max_positions: int
    positions: Positions
    rotary_base: float
    rotary_scaling: RotaryScaling | None
    window: int | None
    """Number of tokens that a token attends to, itself included; None: all earlier ones."""
    activation: Activation
    norm: Norm
    norm_eps: float
    bias: Bias
    qk_norm: bool
    tied_embeddings: bool
    dropout: float
    initializer_range: float
    attention: Kernel

    @property
    def block(self) -> BlockShape:
        """The shape of every block."""
        norm = NormShape(kind=self.norm, eps=self.norm_eps, bias=self.bias is True)
        return BlockShape(
            attention=AttentionShape(
                hidden_size=self.hidden_size,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                own_head_size=self.head_size,
                bias=bool(self.bias),
                output_bias=self.bias in (True, "attention"),
                causal=True,
                window=None if self.window is None else self.window - 1,
                rotary_base=self.rotary_base if self.positions == "rotary" else None,
                rotary_scaling=self.rotary_scaling,
                head_norm=norm if self.qk_norm else None,
                kernel=self.attention,
            ),
            intermediate_size=self.intermediate_size,
            # GPT-2's GELU is the tanh approximation.
            activation="swiglu" if self.activation == "swiglu" else "gelu_tanh",
            bias=self.bias is True,
            norm=norm,
            attention_dropout=self.dropout,
            feed_forward_dropout=self.dropout,
        )

    def model_spec(self, seq_len: int) -> ModelSpec:
        """Return the quantities that determine memory, time and FLOPs."""
        return ModelSpec(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            feed_forward=self.intermediate_size,
            gated=self.block.gated,
            causal=True,
            window=None if self.window is None else self.window - 1,
            global_every=0,
            vocabulary=self.num_embeddings,
            position_rows=self.max_positions if self.positions == "learned" else 0,
            tied=self.tied_embeddings,
            block_vectors=self.block.vectors,
            dropouts=2 if self.dropout else 0,
            qk_norm=self.qk_norm,
            seq_len=seq_len,
        )
