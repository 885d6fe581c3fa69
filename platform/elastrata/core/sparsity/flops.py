"""What zeros save, counted. Numbers in, numbers out.

A weight is multiplied once per token in the forward pass and twice in the backward pass, for the
gradient of the input and for its own; a multiplication with its addition counts as two. With a
weight at zero none of the three is needed: 6 FLOPs per zero and token. An update of RigL needs the
gradients of all weights, so in its step only two of the three can be left out: 4 FLOPs. What is not
the matrix of a sparse layer (embeddings, head, attention's own products) costs what it costs.
"""

from __future__ import annotations

_ALL, _WITHOUT_GRADIENT = 6, 4


def flops_of_zeros(zeros: int, tokens: int, *, dense_gradient: bool = False) -> int:
    """The FLOPs of forward and backward that a device which skips zeros saves.

    Args:
        zeros: weights held at zero, each applied once to every token.
        tokens: of the global batch.
        dense_gradient: whether the gradients of all weights are needed.
    """
    return (_WITHOUT_GRADIENT if dense_gradient else _ALL) * zeros * tokens
