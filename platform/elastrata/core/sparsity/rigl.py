"""RigL (Evci et al., arXiv 1911.11134, algorithm 1) on sharded matrices: small weights go, weights
with large gradients come.

Whatever the number of ranks, the same weights go and come where weights and gradients are the
same: of equal ones those that come first in the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from elastrata.core.sharding import local
from elastrata.core.sparsity.config import RiglConfig
from elastrata.core.sparsity.draw import element_hashes
from elastrata.core.sparsity.shards import elements, smallest

_PLACE_BITS = 32
_LARGEST = 0x7FFFFFFF
"""The bits of an fp32 number without its sign, at most."""
_NEVER = -1
"""The largest key: of elements that are not to be chosen."""
_LATER = -(1 << 63)
"""The highest bit of a key."""


def drop_fraction(config: RiglConfig, step: int, steps: int) -> float:
    """The share of weights that step `step` of a phase replaces; 0 where it is none of an update.

    Args:
        config: the phase's.
        step: counted from 1.
        steps: of the phase.
    """
    end = config.until * steps
    if step % config.schedule.every or step >= end:
        return 0.0
    return config.schedule.fraction / 2 * (1 + math.cos(math.pi * step / end))


def updated(
    matrices: Sequence[Tensor],
    gradients: Sequence[Tensor],
    masks: Sequence[Tensor],
    counts: Sequence[int],
) -> list[Tensor]:
    """New masks with as many zeros as before. Collective over the axes that shard the matrices.

    Args:
        matrices: weights in fp32, sharded or not.
        gradients: dense and finite, sharded likewise.
        masks: this rank's shards, true where a weight is held at zero.
        counts: how many weights of each whole matrix are replaced.
    """
    places = [elements(matrix) for matrix in matrices]
    leaving = [
        torch.where(mask, _NEVER, _by_size(local(matrix)) | place)
        for matrix, mask, place in zip(matrices, masks, places, strict=True)
    ]
    free = [
        mask | gone for mask, gone in zip(masks, smallest(matrices, leaving, counts), strict=True)
    ]
    coming = [
        torch.where(zero, ((_LARGEST << _PLACE_BITS) - _by_size(local(gradient))) | place, _NEVER)
        for gradient, zero, place in zip(gradients, free, places, strict=True)
    ]
    return [zero & ~new for zero, new in zip(free, smallest(matrices, coming, counts), strict=True)]


def adapted(matrix: Tensor, mask: Tensor, name_key: int, count: int) -> Tensor:
    """A mask with `count` zeros made from another one: weights that were zero stay so first, in the
    order of their hashes, then the smallest of the others become zero. Collective likewise.

    Args:
        matrix: weights in fp32, sharded or not.
        mask: this rank's shard of the mask so far.
        name_key: of the hashes.
        count: zeros of the whole matrix.
    """
    place = elements(matrix)
    drawn = element_hashes(name_key, place) & (_LARGEST << _PLACE_BITS)
    keys = torch.where(mask, drawn | place, _LATER | _by_size(local(matrix)) | place)
    return smallest([matrix], [keys], [count])[0]


def _by_size(values: Tensor) -> Tensor:
    """The bits of absolute values, which are in the order of the values, above those of a place."""
    bits = values.detach().float().abs().contiguous().view(torch.int32)
    return bits.long() << _PLACE_BITS
