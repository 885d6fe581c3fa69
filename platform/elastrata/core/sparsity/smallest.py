"""The smallest elements of sharded matrices, found exactly and without gathering any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastrata.core.sparsity.shard_sums import sums_over_shards

_DIGIT_BITS, _KEY_BITS = 8, 64
_DIGITS = 1 << _DIGIT_BITS
_SIGN = -(1 << (_KEY_BITS - 1))
_MOST_AT_ONCE = 2**26
"""Elements whose keys, 8 bytes each, are in memory at once, over all ranks."""


def smallest(
    matrices: Sequence[Tensor], keys: Sequence[Tensor], counts: Sequence[int]
) -> list[Tensor]:
    """Of each matrix the elements with the smallest keys: this rank's shard of them, as booleans.

    Collective over the axes that shard the matrices: for each of them eight messages of 256 numbers
    a matrix, for all matrices together. Finds the digits of the largest key that belongs to
    them, from the highest on, by counting how many keys have which.

    Args:
        matrices: say how they are sharded; values do not matter.
        keys: of this rank's shard of each; 64 bits, without a sign, in an int64. Those up to the
            count-th must all differ, over all ranks.
        counts: how many elements of each whole matrix; there are as many.
    """
    below = torch.zeros(len(keys), dtype=torch.int64)
    left = torch.tensor(counts, dtype=torch.int64)
    rest = [key.flatten() for key in keys]
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = [(key >> shift) & (_DIGITS - 1) for key in rest]
        found = torch.stack([torch.bincount(digit, minlength=_DIGITS) for digit in digits])
        totals = sums_over_shards(matrices, found).cpu().cumsum(1)
        chosen = (totals < left[:, None]).sum(1)
        smaller = totals.gather(1, (chosen - 1).clamp(min=0)[:, None])[:, 0]
        left -= torch.where(chosen > 0, smaller, 0)
        below |= chosen << shift
        rest = [
            key[digit == int(one)] for key, digit, one in zip(rest, digits, chosen, strict=True)
        ]
    return [
        _ordered(key) <= (limit ^ _SIGN) if count else torch.zeros_like(key, dtype=torch.bool)
        for key, limit, count in zip(keys, below.tolist(), counts, strict=True)
    ]


def in_portions(matrices: Sequence[Tensor]) -> Iterator[slice]:
    """Portions of matrices whose keys fit into memory, the same on every rank."""
    first, elements = 0, 0
    for place, matrix in enumerate(matrices):
        if place > first and elements + matrix.numel() > _MOST_AT_ONCE:
            yield slice(first, place)
            first, elements = place, 0
        elements += matrix.numel()
    if matrices:
        yield slice(first, len(matrices))


def _ordered(keys: Tensor) -> Tensor:
    """Keys without a sign as numbers with one, in the same order."""
    return keys ^ _SIGN
