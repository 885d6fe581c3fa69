"""The numbers that fix a GPT, and the parts it is composed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastrata.core.model_spec import ModelSpec
from elastrata_workloads.unpadded.kernel import Kernel

Positions = Literal["learned", "rotary"]
Activation = Literal["gelu", "swiglu"]
Norm = Literal["layer", "rms"]


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """Everything that fixes the model's parameters and how they are applied."""

    num_ids: int
    """Real ids; the model gives a logit for each."""
    num_embeddings: int
    """Rows of the embedding table, at least `num_ids`."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_positions: int
    positions: Positions
    rotary_base: float
    activation: Activation
    norm: Norm
    norm_eps: float
    bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dropout: float
    initializer_range: float
    attention: Kernel

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    def model_spec(self, seq_len: int) -> ModelSpec:
        """The numbers that memory, time and FLOPs depend on."""
        gated = self.activation == "swiglu"
        kv_width = self.num_kv_heads * self.head_size
        biases = 3 * self.hidden_size + 2 * kv_width + (2 if gated else 1) * self.intermediate_size
        normed = 2 * self.hidden_size + (2 * self.head_size if self.qk_norm else 0)
        norms = normed * (2 if self.norm == "layer" and self.bias else 1)
        return ModelSpec(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            feed_forward=self.intermediate_size,
            gated=gated,
            causal=True,
            vocabulary=self.num_embeddings,
            position_rows=self.max_positions if self.positions == "learned" else 0,
            tied=self.tied_embeddings,
            block_vectors=norms + (biases if self.bias else 0),
            qk_norm=self.qk_norm,
            seq_len=seq_len,
        )
