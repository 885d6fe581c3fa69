"""Sizes and options of a ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.workload.model_spec import ModelSpec
from elastrata_workloads.unpadded.shapes import AttentionShape, BlockShape, Kernel, NormShape


@dataclass(frozen=True, kw_only=True)
class ModernBertShape:
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
    window: int
    """Number of tokens that a local layer attends to around each token, half of them to each
    side."""
    global_every: int
    """Period of global layers, beginning with the first layer; they attend to all tokens."""
    global_rotary_base: float
    local_rotary_base: float
    norm_eps: float
    attention_dropout: float
    initializer_range: float
    attention: Kernel

    @property
    def norm(self) -> NormShape:
        """The shape of every norm, without biases."""
        return NormShape(eps=self.norm_eps, bias=False)

    def block(self, number: int) -> BlockShape:
        """Return the shape of block `number`, counted from 0."""
        is_global = number % self.global_every == 0
        return BlockShape(
            attention=AttentionShape(
                hidden_size=self.hidden_size,
                num_heads=self.num_heads,
                num_kv_heads=self.num_heads,
                bias=False,
                output_bias=False,
                causal=False,
                window=None if is_global else self.window // 2,
                rotary_base=self.global_rotary_base if is_global else self.local_rotary_base,
                kernel=self.attention,
            ),
            intermediate_size=self.intermediate_size,
            activation="geglu",
            bias=False,
            norm=self.norm,
            # The embeddings end with a norm, so the first block needs none.
            normed_input=number > 0,
            attention_dropout=self.attention_dropout,
            feed_forward_dropout=0.0,
        )

    def model_spec(self, seq_len: int, mask_probability: float) -> ModelSpec:
        """Return the quantities that determine memory, time and FLOPs."""
        return ModelSpec(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_heads,
            feed_forward=self.intermediate_size,
            gated=True,
            causal=False,
            window=self.window // 2,
            global_every=self.global_every,
            vocabulary=self.num_embeddings,
            position_rows=0,
            embedding_additions=0,
            embedding_norm=True,
            first_norm=False,
            dropouts=1 if self.attention_dropout else 0,
            tied=True,
            block_vectors=self.block(1).vectors,
            # The head's dense layer.
            head_extra=self.hidden_size**2,
            head_states=5,
            predicted=mask_probability,
            seq_len=seq_len,
        )
