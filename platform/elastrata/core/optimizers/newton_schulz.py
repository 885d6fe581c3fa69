"""Newton-Schulz: a matrix with the same singular vectors and singular values near 1."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Keller Jordan's quintic (kellerjordan.github.io/posts/muon): steep at 0, never settling at 1."""
_STEPS = 5
_EPS = 1e-7


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Five steps of the quintic X -> a X + b (X X^T) X + c (X X^T)^2 X.

    Args:
        matrix: shape [m, n]. All zeros stay so.
        dtype: in which it is computed.

    Returns:
        Shape [m, n], of the dtype of `matrix`; singular values of some 0.7 to 1.2, but for those
        that were tiny beside the largest.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x.to(dtype)
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
