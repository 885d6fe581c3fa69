"""The numbers that fix a GPT, and the parts it is composed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    tied_embeddings: bool
    dropout: float
    initializer_range: float
    attention: Kernel

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads
