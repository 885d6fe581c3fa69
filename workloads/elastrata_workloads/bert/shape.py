"""Sizes and options of a BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastrata.workload.model_spec import ModelSpec
from elastrata_workloads.unpadded.shapes import AttentionShape, Kernel, NormShape

_TOKEN_TYPES = 2
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True, kw_only=True)
class BertShape:
    """Sizes and options that define the model's parameters and computation."""

    num_ids: int
    """Number of real ids; the model has a logit for each."""
    num_embeddings: int
    """Rows of the embedding table, at least `num_ids`."""
    pad_id: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    layer_norm_eps: float
    dropout: float
    initializer_range: float
    next_sentence: bool
    qk_norm: bool
    activation: Activation
    attention: Kernel

    @property
    def self_attention(self) -> AttentionShape:
        """The self-attention of each block."""
        return AttentionShape(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            bias=True,
            output_bias=True,
            causal=False,
            head_norm=NormShape(eps=self.layer_norm_eps) if self.qk_norm else None,
            kernel=self.attention,
        )

    def model_spec(self, seq_len: int, mask_probability: float) -> ModelSpec:
        """Return the quantities that determine memory, time and FLOPs."""
        e = self.hidden_size
        # Query, key, value, output and the second matrix of the feed-forward; then its first one.
        biases = 5 * e + self.intermediate_size
        # Two norms with weight and bias; `qk_norm` adds two over the features of a head.
        norms = 4 * e + (4 * e // self.num_heads if self.qk_norm else 0)
        return ModelSpec(
            layers=self.num_layers,
            hidden=e,
            heads=self.num_heads,
            kv_heads=self.num_heads,
            feed_forward=self.intermediate_size,
            gated=False,
            causal=False,
            vocabulary=self.num_embeddings,
            position_rows=self.max_positions + _TOKEN_TYPES,
            # Positions and token types.
            embedding_additions=2,
            embedding_norm=True,
            tied=True,
            block_vectors=biases + norms,
            dropouts=2 if self.dropout else 0,
            qk_norm=self.qk_norm,
            # The head's dense layer.
            head_extra=e * e,
            # Pooler and next-sentence head, once per sample.
            sample_extra=e * (e + 2) if self.next_sentence else 0,
            predicted=mask_probability,
            seq_len=seq_len,
        )
