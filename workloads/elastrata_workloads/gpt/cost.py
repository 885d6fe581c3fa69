"""What GPT costs in floating-point operations, counted from the shapes of its matrices.

A multiplication with its addition counts as two. E, F, K, D, V as in `model.py`; s: length of a
sample, or of a document packed in one.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastrata_pipelines.deal import WorkModel
from elastrata_workloads.gpt.shape import GptShape

_FORWARD = 2
_FORWARD_AND_BACKWARD = 6
"""Per parameter and token: the backward pass multiplies twice, for the input and for the weight."""


def block_parameters(shape: GptShape) -> int:
    """Parameters of all blocks' matrices: query, key, value, output, and the feed-forward's two,
    or three with SwiGLU."""
    e, f, kv = shape.hidden_size, shape.intermediate_size, shape.num_kv_heads * shape.head_size
    feed_forward = (3 if shape.activation == "swiglu" else 2) * e * f
    return shape.num_layers * (2 * e * e + 2 * e * kv + feed_forward)


def head_parameters(shape: GptShape) -> int:
    """Parameters of the matrix that gives logits, tied or not."""
    return shape.hidden_size * shape.num_embeddings


def attention_products(shape: GptShape, length: int) -> int:
    """Products in all blocks' attention for one sample, causal-halved: s^2 E / 2 for scores, as
    many for values."""
    return shape.num_layers * shape.hidden_size * length * length


def work(shape: GptShape) -> WorkModel:
    """FLOPs of the forward pass for a sample by its length. Every token predicts."""
    return WorkModel(
        linear=_FORWARD * (block_parameters(shape) + head_parameters(shape)),
        quadratic=_FORWARD * attention_products(shape, 1),
    )


def block_costs(shape: GptShape, length: int) -> list[int]:
    """FLOPs of every block's forward pass for a sample, with those of the embeddings, an addition
    for each feature, in the first, and those of the head in the last."""
    products = block_parameters(shape) * length + attention_products(shape, length)
    costs = [_FORWARD * products // shape.num_layers] * shape.num_layers
    costs[0] += shape.hidden_size * length
    costs[-1] += _FORWARD * head_parameters(shape) * length
    return costs


def training_flops(shape: GptShape, lengths: Sequence[int], num_predictions: int) -> int:
    """FLOPs of forward and backward, without recomputation, for samples of these lengths."""
    products = (
        block_parameters(shape) * int(sum(lengths))
        + sum(attention_products(shape, int(length)) for length in lengths)
        + head_parameters(shape) * num_predictions
    )
    return _FORWARD_AND_BACKWARD * products
