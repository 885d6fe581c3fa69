"""Matrices that ranks have shards of: where the elements of a shard lie, sums over all shards, and
the smallest elements, found exactly and without gathering any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from elastrata.core.readback import to_device
from elastrata.core.sharding import MeshAxis, axes_as_divided, local, sharding_axes

Value = TypeVar("Value")
_DIGIT_BITS, _KEY_BITS = 8, 64
_DIGITS = 1 << _DIGIT_BITS
_SIGN = -(1 << (_KEY_BITS - 1))
_MOST_AT_ONCE = 2**26
"""Elements whose keys, 8 bytes each, are in memory at once, over all ranks."""


def rows_and_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows and which columns of the whole matrix this rank's shard has: int64, of shapes
    [rows] and [columns] of the shard, either maybe empty.

    Args:
        matrix: shape [m, n], plain or a DTensor of any layout that divides rows or columns.
    """
    places = [torch.arange(size, device=local(matrix).device) for size in matrix.shape]
    for axis in axes_as_divided(matrix):
        parts = torch.chunk(places[axis.dim], axis.size)  # the last ones may be missing
        places[axis.dim] = parts[axis.rank] if axis.rank < len(parts) else places[axis.dim][:0]
    return places[0], places[1]


def no_mask(matrix: Tensor) -> Tensor:
    """This rank's shard of a mask of that matrix which is nowhere true."""
    return torch.zeros_like(local(matrix), dtype=torch.bool)


def elements(matrix: Tensor) -> Tensor:
    """The place of each element of this rank's shard in the whole matrix, counted row by row;
    int64, of the shard's shape."""
    rows, columns = rows_and_columns(matrix)
    return rows[:, None] * matrix.shape[1] + columns


def sums_over_shards(matrices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Adds up what ranks know of their shards; the same on all of them.

    Collective over the axes that shard the matrices, one message for each.

    Args:
        matrices: say how they are sharded; their values do not matter.
        values: shape [matrices, n], of this rank's shards; changed.
    """
    rows: dict[MeshAxis, list[int]] = {}
    for number, matrix in enumerate(matrices):
        for axis in sharding_axes(matrix):
            rows.setdefault(axis, []).append(number)
    for axis, numbers in rows.items():
        places = to_device(torch.tensor(numbers), values.device)  # of a list, the host would wait
        summed = values.index_select(0, places)
        dist.all_reduce(summed, group=axis.group)
        values.index_copy_(0, places, summed)
    return values


def of_all_stages(
    values: Mapping[str, Value], pipeline: dist.ProcessGroup | None
) -> dict[str, Value]:
    """The values of all layers, the same on every rank. Collective over the ranks of a pipeline.

    Args:
        values: of this rank's layers, by name.
        pipeline: the ranks that have the model's stages between them; None: this one has all.
    """
    if pipeline is None:
        return dict(values)
    heard: list[dict[str, Value]] = [{}] * pipeline.size()
    dist.all_gather_object(heard, dict(values), group=pipeline)
    return {name: value for told in heard for name, value in told.items()}


def counts_over_shards(is_meant: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[int]:
    """How many elements of each whole matrix are true; collective likewise.

    Args:
        is_meant: this rank's shards, of booleans.
        matrices: say how they are sharded.
    """
    if not is_meant:
        return []
    counts = torch.stack([torch.count_nonzero(shard) for shard in is_meant])[:, None]
    return [int(count) for count in sums_over_shards(matrices, counts)[:, 0].tolist()]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements are; the same on every rank. Collective over all of them."""
    finite = torch.ones((), dtype=torch.int32, device=local(tensors[0]).device)
    for tensor in tensors:
        finite &= torch.isfinite(local(tensor)).all().int()
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite.item())


def smallest(
    matrices: Sequence[Tensor], keys: Sequence[Tensor], counts: Sequence[int]
) -> list[Tensor]:
    """The elements with the smallest keys of each matrix: this rank's shard of them, as booleans.

    Collective over the axes that shard the matrices: for each of them eight messages of 256 numbers
    a matrix, for all matrices together. Finds the digits of the largest key that belongs to
    them, from the highest on, by counting how many keys have which.

    Args:
        matrices: say how they are sharded; values do not matter.
        keys: of this rank's shard of each; 64 bits, without a sign, in an int64. Those up to the
            count-th must all differ, over all ranks.
        counts: how many elements of each whole matrix; there are as many.
    """
    device = keys[0].device if keys else torch.device("cpu")
    below = torch.zeros(len(keys), dtype=torch.int64, device=device)
    left = to_device(torch.tensor(counts, dtype=torch.int64), device)
    remaining = [Remaining.of(key) for key in keys]
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts_here = torch.stack([some.counts(shift) for some in remaining])
        totals = sums_over_shards(matrices, counts_here).cumsum(1)
        chosen = (totals < left[:, None]).sum(1)
        smaller = totals.gather(1, (chosen - 1).clamp(min=0)[:, None])[:, 0]
        left -= torch.where(chosen > 0, smaller, 0)
        below |= chosen << shift
        for some, digit in zip(remaining, chosen, strict=True):
            some.keep(shift, digit)
    return [
        _ordered(key) <= (limit ^ _SIGN) if count else torch.zeros_like(key, dtype=torch.bool)
        for key, limit, count in zip(keys, below, counts, strict=True)
    ]


class Remaining:
    """The keys of a shard that have the digits which were chosen so far."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys

    @staticmethod
    def of(keys: Tensor) -> Remaining:
        """All keys of a shard."""
        return (Remaining if keys.device.type == "cpu" else MarkedRemaining)(keys.flatten())

    def counts(self, shift: int) -> Tensor:
        """How many have which digit there; shape [256]."""
        return torch.bincount(self._digits(shift), minlength=_DIGITS)

    def keep(self, shift: int, digit: Tensor) -> None:
        """Those that have this one, a scalar, there."""
        self._keys = self._keys[self._digits(shift) == digit]

    def _digits(self, shift: int) -> Tensor:
        return (self._keys >> shift) & (_DIGITS - 1)


class MarkedRemaining(Remaining):
    """On a GPU: all keys stay, and those that are out have a digit that is not counted. How many
    are left decides about no shape, so that no host waits to know it."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__(keys)
        self._is_in = torch.ones_like(keys, dtype=torch.bool)

    @override
    def counts(self, shift: int) -> Tensor:
        counts = self._keys.new_zeros(_DIGITS)
        return counts.scatter_add_(0, self._digits(shift), self._is_in.long())

    @override
    def keep(self, shift: int, digit: Tensor) -> None:
        self._is_in &= self._digits(shift) == digit


def in_portions(matrices: Sequence[Tensor]) -> Iterator[slice]:
    """Portions of matrices whose keys fit into memory, the same on every rank."""
    first, size = 0, 0
    for number, matrix in enumerate(matrices):
        if number > first and size + matrix.numel() > _MOST_AT_ONCE:
            yield slice(first, number)
            first, size = number, 0
        size += matrix.numel()
    if matrices:
        yield slice(first, len(matrices))


def _ordered(keys: Tensor) -> Tensor:
    """Keys without a sign as numbers with one, in the same order."""
    return keys ^ _SIGN
