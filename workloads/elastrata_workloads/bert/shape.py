"""The numbers that fix a BERT."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata_workloads.unpadded.kernel import Kernel


@dataclass(frozen=True, kw_only=True)
class BertShape:
    """Everything that fixes the model's parameters and how they are applied."""

    num_ids: int
    """Real ids; the model gives a logit for each."""
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
    attention: Kernel
