"""A GPT as the planner sees it."""

from __future__ import annotations

from elastrata.core.model_spec import ModelSpec
from elastrata_workloads.gpt.shape import GptShape


def transformer(shape: GptShape, seq_len: int) -> ModelSpec:
    """The numbers that memory and time depend on."""
    gated = shape.activation == "swiglu"
    kv_width = shape.num_kv_heads * shape.head_size
    biases = 3 * shape.hidden_size + 2 * kv_width + (2 if gated else 1) * shape.intermediate_size
    norms = 2 * shape.hidden_size * (2 if shape.norm == "layer" and shape.bias else 1)
    return ModelSpec(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        feed_forward=shape.intermediate_size,
        gated=gated,
        causal=True,
        vocabulary=shape.num_embeddings,
        position_rows=shape.max_positions if shape.positions == "learned" else 0,
        tied=shape.tied_embeddings,
        block_vectors=norms + (biases if shape.bias else 0),
        seq_len=seq_len,
    )
