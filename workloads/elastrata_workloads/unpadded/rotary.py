"""Rotary positions: queries and keys turned by angles that grow with the position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(heads: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turns every head by angles that grow with the position (Su et al. 2021, arXiv 2104.09864).

    Feature i of the first half of a head and feature i of the second half are turned as a pair, by
    position * base^(-2 i / D): transformers' layout of weights. In fp32, as bf16 could not tell
    neighbouring positions apart.

    Args:
        heads: shape [T, H, D], D even.
        positions: shape [T], int64: place of each token in its segment.
        base: the slowest pair takes about 2 pi * base positions to turn once.
    """
    size = heads.shape[-1]
    exponents = torch.arange(0, size, 2, device=heads.device, dtype=torch.float32) / size
    angles = (positions[:, None] * (1.0 / base**exponents))[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)
