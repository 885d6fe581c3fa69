"""RigL (Evci et al., arXiv 1911.11134, algorithm 1) on sharded matrices: the smallest weights are
dropped, and weights with the largest gradients grow.

The choice is the same at any number of ranks if weights and gradients are the same. Among equal
values, those that come first in the matrix are chosen.

Random masks follow from hashes of (seed, parameter's name, place in the matrix) alone. A rank
therefore only needs to know its shard, and no rank draws from a sequence. A mask is true if the
weight is held at zero.

The hashes are equal to the bit to those of `elastrata_pipelines.hashing`, on any device. Torch has
few operations on unsigned integers, so a hash is an int64 with the same 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from elastrata.device.device_transfer import to_device
from elastrata.parallel.sharding import MeshAxis, axes_in_division_order, local, sharding_axes
from elastrata.sparsity.config import AnySparsity, BlockConfig, RiglConfig, TwoFourConfig
from elastrata_pipelines.hashing import key, mix, text_hash

Value = TypeVar("Value")
_DIGIT_BITS, _KEY_BITS = 8, 64
_DIGITS = 1 << _DIGIT_BITS
_SIGN = -(1 << (_KEY_BITS - 1))
_MOST_AT_ONCE = 2**26
"""Number of elements, over all ranks, whose keys of 8 bytes are in memory at the same time."""


def rows_and_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of this rank's rows and columns in the whole matrix.

    Args:
        matrix: shape [m, n], plain or a DTensor of any layout that divides rows or columns.

    Returns:
        int64, of shapes [rows] and [columns] of the shard; either may be empty.
    """
    places = [torch.arange(size, device=local(matrix).device) for size in matrix.shape]
    for axis in axes_in_division_order(matrix):
        parts = torch.chunk(places[axis.dim], axis.size)  # may return fewer parts
        places[axis.dim] = parts[axis.rank] if axis.rank < len(parts) else places[axis.dim][:0]
    return places[0], places[1]


def empty_mask(matrix: Tensor) -> Tensor:
    """Return this rank's shard of an all-false mask of the matrix."""
    return torch.zeros_like(local(matrix), dtype=torch.bool)


def elements(matrix: Tensor) -> Tensor:
    """Return the index of each element of this rank's shard in the whole matrix, row by row.

    int64, of the shard's shape.
    """
    rows, columns = rows_and_columns(matrix)
    return rows[:, None] * matrix.shape[1] + columns


def sums_over_shards(matrices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Sum values of shards over the ranks; all ranks get the same sums.

    Collective over the axes that shard the matrices, one message for each.

    Args:
        matrices: tensors with the sharding; their values are not used.
        values: shape [matrices, n], of this rank's shards; overwritten.
    """
    rows: dict[MeshAxis, list[int]] = {}
    for number, matrix in enumerate(matrices):
        for axis in sharding_axes(matrix):
            rows.setdefault(axis, []).append(number)
    for axis, numbers in rows.items():
        # Indexing with a list would make the host wait for the device.
        places = to_device(torch.tensor(numbers), values.device)
        sums = values.index_select(0, places)
        dist.all_reduce(sums, group=axis.group)
        values.index_copy_(0, places, sums)
    return values


def gather_over_stages(
    values: Mapping[str, Value], pipeline: dist.ProcessGroup | None
) -> dict[str, Value]:
    """Return the values of the layers of all stages, on every rank. Collective over a pipeline's
    ranks."""
    if pipeline is None:
        return dict(values)
    gathered: list[dict[str, Value]] = [{}] * pipeline.size()
    dist.all_gather_object(gathered, dict(values), group=pipeline)
    return {name: value for stage_values in gathered for name, value in stage_values.items()}


def counts_over_shards(is_meant: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[int]:
    """Return the number of true elements of each whole matrix. Collective like
    `sums_over_shards`."""
    if not is_meant:
        return []
    counts = torch.stack([torch.count_nonzero(shard) for shard in is_meant])[:, None]
    return [int(count) for count in sums_over_shards(matrices, counts)[:, 0].tolist()]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all elements are finite, on every rank. Collective over all ranks."""
    finite = torch.ones((), dtype=torch.int32, device=local(tensors[0]).device)
    for tensor in tensors:
        finite &= torch.isfinite(local(tensor)).all().int()
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite.item())


def smallest(
    matrices: Sequence[Tensor], keys: Sequence[Tensor], counts: Sequence[int]
) -> list[Tensor]:
    """Return this rank's shard of a mask of the elements with the smallest keys of each matrix.

    Collective over the axes that shard the matrices: for all matrices together, eight messages per
    axis, of 256 numbers per matrix.

    Args:
        matrices: tensors with the sharding; their values are not used.
        keys: keys of this rank's shard of each matrix: unsigned 64 bits in an int64. The smallest
            ones, up to the count, must all differ over all ranks.
        counts: number of elements to select in each whole matrix, which has at least as many.
    """
    # A radix selection: it finds the digits of the largest selected key, from the highest to the
    # lowest, by counting the keys with each digit.
    device = keys[0].device if keys else torch.device("cpu")
    largest_keys = torch.zeros(len(keys), dtype=torch.int64, device=device)
    counts_left = to_device(torch.tensor(counts, dtype=torch.int64), device)
    remaining = [Remaining.of(key) for key in keys]
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts_here = torch.stack([keys_left.counts(shift) for keys_left in remaining])
        totals = sums_over_shards(matrices, counts_here).cumsum(1)
        digits = (totals < counts_left[:, None]).sum(1)
        smaller = totals.gather(1, (digits - 1).clamp(min=0)[:, None])[:, 0]
        counts_left -= torch.where(digits > 0, smaller, 0)
        largest_keys |= digits << shift
        for keys_left, digit in zip(remaining, digits, strict=True):
            keys_left.keep(shift, digit)
    return [
        _to_signed_order(key) <= (limit ^ _SIGN)
        if count
        else torch.zeros_like(key, dtype=torch.bool)
        for key, limit, count in zip(keys, largest_keys, counts, strict=True)
    ]


class Remaining:
    """The keys of a shard whose digits equal those found so far."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys

    @staticmethod
    def of(keys: Tensor) -> Remaining:
        """Return all keys of a shard."""
        return (Remaining if keys.device.type == "cpu" else MarkedRemaining)(keys.flatten())

    def counts(self, shift: int) -> Tensor:
        """Return the number of keys with each digit at `shift`, shape [256]."""
        return torch.bincount(self._digits(shift), minlength=_DIGITS)

    def keep(self, shift: int, digit: Tensor) -> None:
        """Keep the keys with this digit, a scalar, at `shift`."""
        self._keys = self._keys[self._digits(shift) == digit]

    def _digits(self, shift: int) -> Tensor:
        return (self._keys >> shift) & (_DIGITS - 1)


class MarkedRemaining(Remaining):
    """Remaining keys on a GPU: all keys stay in memory, and a mask marks those that remain."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__(keys)
        # Shapes do not depend on the number of remaining keys, so the host never waits to learn it.
        self._is_in = torch.ones_like(keys, dtype=torch.bool)

    @override
    def counts(self, shift: int) -> Tensor:
        counts = self._keys.new_zeros(_DIGITS)
        return counts.scatter_add_(0, self._digits(shift), self._is_in.long())

    @override
    def keep(self, shift: int, digit: Tensor) -> None:
        self._is_in &= self._digits(shift) == digit


def memory_portions(matrices: Sequence[Tensor]) -> Iterator[slice]:
    """Yield portions of the matrices whose keys fit into memory, the same on every rank."""
    first, size = 0, 0
    for number, matrix in enumerate(matrices):
        if number > first and size + matrix.numel() > _MOST_AT_ONCE:
            yield slice(first, number)
            first, size = number, 0
        size += matrix.numel()
    if matrices:
        yield slice(first, len(matrices))


def _to_signed_order(keys: Tensor) -> Tensor:
    """Return unsigned keys as signed numbers in the same order."""
    return keys ^ _SIGN


_SIGN_BIT = -(1 << 63)
_HASH_BITS = 64
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_masks(
    config: AnySparsity, matrices: Mapping[str, Tensor], levels: Mapping[str, float], seed: int
) -> dict[str, Tensor]:
    """Return this rank's shards of random masks. Collective over the axes that shard the matrices.

    Args:
        config: the method.
        matrices: matrices by parameter name, sharded or not.
        levels: share of zeros by parameter name, rounded to a whole number of weights or blocks.
        seed: seed of the masks.
    """
    keys = {name: key(seed, text_hash(name)) for name in matrices}
    if isinstance(config, TwoFourConfig):
        return {name: _random_two_of_four(m, keys[name]) for name, m in matrices.items()}
    if isinstance(config, BlockConfig):
        return {
            name: _random_blocks(m, keys[name], levels[name], config.block)
            for name, m in matrices.items()
        }
    return _random_weights(matrices, levels, keys)


def zeros_of(matrix: Tensor, level: float) -> int:
    """Return the number of zeros of a matrix at that level."""
    return round(level * matrix.numel())


def _random_weights(
    matrices: Mapping[str, Tensor], levels: Mapping[str, float], keys: Mapping[str, int]
) -> dict[str, Tensor]:
    """Select the weights with the smallest hashes."""
    names = list(matrices)
    masks: list[Tensor] = []
    for portion in memory_portions(list(matrices.values())):
        some = [matrices[name] for name in names[portion]]
        hashes = [element_hashes(keys[name], elements(matrices[name])) for name in names[portion]]
        # By the same hashes at every level, so the zeros of a lower level are among those of a
        # higher one.
        counts = [zeros_of(matrices[name], levels[name]) for name in names[portion]]
        masks += smallest(some, hashes, counts)
    return dict(zip(names, masks, strict=True))


def _random_blocks(matrix: Tensor, name_key: int, level: float, size: int) -> Tensor:
    """Select the blocks with the smallest hashes."""
    num_rows, num_columns = (extent // size for extent in matrix.shape)
    # There are few blocks, so every rank sorts all of them.
    numbers = torch.arange(num_rows * num_columns, device=local(matrix).device)
    order = torch.argsort(element_hashes(name_key, numbers) ^ _SIGN_BIT)
    is_zero = torch.zeros_like(numbers, dtype=torch.bool)
    is_zero[order[: round(level * len(numbers))]] = True
    rows, columns = rows_and_columns(matrix)
    return is_zero.view(num_rows, num_columns)[rows // size][:, columns // size]


def _random_two_of_four(matrix: Tensor, name_key: int) -> Tensor:
    """Select the two smallest hashes of every four neighbours in a row."""
    places = elements(matrix)
    first = places - places % 4  # rows are multiples of four long
    hashes = element_hashes(name_key, places) ^ _SIGN_BIT
    smaller = torch.zeros_like(places)
    # A rank with some of the four computes the hashes of all, as its shard may divide them.
    for neighbour in range(4):
        smaller += (element_hashes(name_key, first + neighbour) ^ _SIGN_BIT) < hashes
    return smaller < 2


def element_hashes(key: int, elements: Tensor) -> Tensor:
    """Return `hashing.combine(key, elements)`; unique among the elements of a key."""
    return _mix(elements ^ _to_signed(int(mix(key))))


def _mix(values: Tensor) -> Tensor:
    """Return `hashing.mix`. Sums and products wrap around."""
    z = values + _to_signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _to_signed(_M1)
    z = (z ^ _shift_right(z, 27)) * _to_signed(_M2)
    return z ^ _shift_right(z, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's own shift repeats the sign."""
    return (values >> bits) & ((1 << (_HASH_BITS - bits)) - 1)


def _to_signed(bits: int) -> int:
    return bits - (1 << _HASH_BITS) if bits >> (_HASH_BITS - 1) else bits


_PLACE_BITS = 32
_MAX_MAGNITUDE = 0x7FFFFFFF
"""Largest magnitude bits of an fp32 number."""
_NEVER_KEY = -1
"""Largest key, of elements that must not be selected."""
_LATER_BIT = -(1 << 63)
"""Highest bit of a key."""


def drop_fraction(config: RiglConfig, step: int, steps: int) -> float:
    """Return the share of weights that a step of a phase replaces; 0 if it changes no masks."""
    end = config.until * steps
    if step % config.schedule.every or step >= end:
        return 0.0
    return config.schedule.fraction / 2 * (1 + math.cos(math.pi * step / end))


def update_masks(
    matrices: Sequence[Tensor],
    gradients: Sequence[Tensor],
    masks: Sequence[Tensor],
    counts: Sequence[int],
) -> list[Tensor]:
    """Return new masks with the same number of zeros. Collective over the axes that shard the
    matrices.

    Args:
        matrices: weights in fp32, sharded or not.
        gradients: dense and finite gradients with the same sharding.
        masks: this rank's shards, true if a weight is held at zero.
        counts: number of weights to replace in each whole matrix.
    """
    places = [elements(matrix) for matrix in matrices]
    drop_keys = [
        # The place in the low bits makes keys unique and decides between equal magnitudes.
        torch.where(mask, _NEVER_KEY, _magnitude_bits(local(matrix)) | place)
        for matrix, mask, place in zip(matrices, masks, places, strict=True)
    ]
    zeros_after_drop = [
        mask | is_dropped
        for mask, is_dropped in zip(masks, smallest(matrices, drop_keys, counts), strict=True)
    ]
    grow_keys = [
        # Inverted magnitudes, so that the smallest key has the largest gradient.
        torch.where(
            is_zero,
            ((_MAX_MAGNITUDE << _PLACE_BITS) - _magnitude_bits(local(gradient))) | place,
            _NEVER_KEY,
        )
        for gradient, is_zero, place in zip(gradients, zeros_after_drop, places, strict=True)
    ]
    return [
        is_zero & ~is_grown
        for is_zero, is_grown in zip(
            zeros_after_drop, smallest(matrices, grow_keys, counts), strict=True
        )
    ]


def adapt_mask(matrix: Tensor, mask: Tensor, name_key: int, count: int) -> Tensor:
    """Return a mask with `count` zeros, made from another mask.

    Weights that were zero remain so first, in the order of their hashes. Then the smallest of the
    other weights become zero. Collective over the axes that shard the matrix.
    """
    place = elements(matrix)
    hashes = element_hashes(name_key, place) & (_MAX_MAGNITUDE << _PLACE_BITS)
    # Zeros have keys without the highest bit, so they are selected first.
    keys = torch.where(mask, hashes | place, _LATER_BIT | _magnitude_bits(local(matrix)) | place)
    return smallest([matrix], [keys], [count])[0]


def _magnitude_bits(values: Tensor) -> Tensor:
    """Return the bits of absolute values, above the bits of a place."""
    # The bits of positive fp32 numbers have the order of the numbers.
    bits = values.detach().float().abs().contiguous().view(torch.int32)
    return bits.long() << _PLACE_BITS
