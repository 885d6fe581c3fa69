"""A BERT as the planner sees it."""

from __future__ import annotations

from elastrata.core.model_spec import ModelSpec
from elastrata_workloads.bert.shape import BertShape

_TOKEN_TYPES = 2


def transformer(shape: BertShape, seq_len: int, mask_probability: float) -> ModelSpec:
    """The numbers that memory and time depend on."""
    pooler = shape.hidden_size * shape.hidden_size if shape.next_sentence else 0
    biases = 5 * shape.hidden_size + shape.intermediate_size
    return ModelSpec(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        heads=shape.num_heads,
        kv_heads=shape.num_heads,
        feed_forward=shape.intermediate_size,
        gated=False,
        causal=False,
        vocabulary=shape.num_embeddings,
        position_rows=shape.max_positions + _TOKEN_TYPES,
        tied=True,
        block_vectors=biases + 4 * shape.hidden_size,
        head_extra=shape.hidden_size * shape.hidden_size + pooler,
        predicted=mask_probability,
        seq_len=seq_len,
    )
