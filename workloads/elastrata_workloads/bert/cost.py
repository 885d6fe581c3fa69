"""What BERT costs in floating-point operations, counted from the shapes of its matrices.

A multiplication with its addition counts as two. E, F, V as in `model.py`; s: length of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastrata_pipelines.deal import WorkModel
from elastrata_workloads.bert.shape import BertShape

_FORWARD = 2
_EMBEDDING_ADDITIONS = 2
_FORWARD_AND_BACKWARD = 6
"""Per parameter and token: the backward pass multiplies twice, for the input and for the weight."""


def block_parameters(shape: BertShape) -> int:
    """Parameters of all blocks' matrices: query, key, value, output, and the feed-forward's two."""
    e, f = shape.hidden_size, shape.intermediate_size
    return shape.num_layers * (4 * e * e + 2 * e * f)


def head_parameters(shape: BertShape) -> int:
    """Parameters of the matrices applied to predicted tokens: transform and decoder."""
    return shape.hidden_size * (shape.hidden_size + shape.num_embeddings)


def pair_parameters(shape: BertShape) -> int:
    """Parameters of the matrices applied once per sample: pooler and next-sentence head."""
    return shape.hidden_size * (shape.hidden_size + 2) if shape.next_sentence else 0


def attention_products(shape: BertShape, length: int) -> int:
    """Products in all blocks' attention for one sample: s^2 E for scores, s^2 E for values."""
    return 2 * shape.num_layers * shape.hidden_size * length * length


def work(shape: BertShape, mask_probability: float) -> WorkModel:
    """FLOPs of the forward pass for a sample by its length, with its expected predictions."""
    head = round(mask_probability * head_parameters(shape))
    return WorkModel(
        linear=_FORWARD * (block_parameters(shape) + head),
        quadratic=_FORWARD * attention_products(shape, 1),
    )


def block_costs(shape: BertShape, length: int, mask_probability: float) -> list[int]:
    """FLOPs of every block's forward pass for a sample, with those of the embeddings, an addition
    for each feature of words, sentences and positions, in the first, and those of the heads, with
    the expected predictions, in the last."""
    products = block_parameters(shape) * length + attention_products(shape, length)
    costs = [_FORWARD * products // shape.num_layers] * shape.num_layers
    costs[0] += _EMBEDDING_ADDITIONS * shape.hidden_size * length
    predictions = round(mask_probability * length)
    costs[-1] += _FORWARD * (head_parameters(shape) * predictions + pair_parameters(shape))
    return costs


def training_flops(shape: BertShape, lengths: Sequence[int], num_predictions: int) -> int:
    """FLOPs of forward and backward, without recomputation, for samples of these lengths."""
    products = (
        block_parameters(shape) * int(sum(lengths))
        + sum(attention_products(shape, int(length)) for length in lengths)
        + head_parameters(shape) * num_predictions
        + pair_parameters(shape) * len(lengths)
    )
    return _FORWARD_AND_BACKWARD * products
