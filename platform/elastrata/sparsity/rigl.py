"""RigL (Evci et al., arXiv 1911.11134, algorithm 1) on sharded matrices: small weights go, weights
with large gradients come.

Whatever the number of ranks, the same weights go and come where weights and gradients are the
same: of equal ones those that come first in the matrix.

Whether a weight is held at zero follows from hashes of (seed, parameter's name, place in the
matrix) alone: no rank needs to know more of a matrix than its shard, and none draws in a sequence.
A mask is true where the weight is held at zero.

The hashes are those of `elastrata_pipelines.hashing`, bit for bit, on any device. Torch has few
operations on unsigned integers: a hash is an int64 with the same 64 bits.
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
from elastrata.parallel.sharding import MeshAxis, axes_as_divided, local, sharding_axes
from elastrata.sparsity.config import AnySparsity, BlockConfig, RiglConfig, TwoFourConfig
from elastrata_pipelines.hashing import key, mix, text_hash

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
    """The values of all layers, the same on every rank. Collective over the ranks of a pipeline."""
    if pipeline is None:
        return dict(values)
    heard: list[dict[str, Value]] = [{}] * pipeline.size()
    dist.all_gather_object(heard, dict(values), group=pipeline)
    return {name: value for told in heard for name, value in told.items()}


def counts_over_shards(is_meant: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[int]:
    """How many elements of each whole matrix are true; collective likewise."""
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


_HASH_SIGN = -(1 << 63)
_BITS = 64
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def drawn(
    config: AnySparsity, matrices: Mapping[str, Tensor], levels: Mapping[str, float], seed: int
) -> dict[str, Tensor]:
    """This rank's shards of the masks. Collective over the axes that shard the matrices.

    Args:
        config: its method counts.
        matrices: by the parameter's name, sharded or not.
        levels: by the same names; of each so many weights are zero, rounded to a whole number of
            weights, or of blocks.
        seed: of the masks.
    """
    keys = {name: key(seed, text_hash(name)) for name in matrices}
    if isinstance(config, TwoFourConfig):
        return {name: _two_of_four(m, keys[name]) for name, m in matrices.items()}
    if isinstance(config, BlockConfig):
        return {
            name: _blocks(m, keys[name], levels[name], config.block) for name, m in matrices.items()
        }
    return _single_weights(matrices, levels, keys)


def zeros_of(matrix: Tensor, level: float) -> int:
    """How many weights of a matrix are zero at that level."""
    return round(level * matrix.numel())


def _single_weights(
    matrices: Mapping[str, Tensor], levels: Mapping[str, float], keys: Mapping[str, int]
) -> dict[str, Tensor]:
    """The weights with the smallest hashes, so that those of a lower level are among them."""
    names = list(matrices)
    masks: list[Tensor] = []
    for portion in in_portions(list(matrices.values())):
        some = [matrices[name] for name in names[portion]]
        hashes = [element_hashes(keys[name], elements(matrices[name])) for name in names[portion]]
        counts = [zeros_of(matrices[name], levels[name]) for name in names[portion]]
        masks += smallest(some, hashes, counts)
    return dict(zip(names, masks, strict=True))


def _blocks(matrix: Tensor, name_key: int, level: float, size: int) -> Tensor:
    """The blocks with the smallest hashes. There are so few that every rank draws all."""
    num_rows, num_columns = (extent // size for extent in matrix.shape)
    numbers = torch.arange(num_rows * num_columns, device=local(matrix).device)
    order = torch.argsort(element_hashes(name_key, numbers) ^ _HASH_SIGN)
    zero = torch.zeros_like(numbers, dtype=torch.bool)
    zero[order[: round(level * len(numbers))]] = True
    rows, columns = rows_and_columns(matrix)
    return zero.view(num_rows, num_columns)[rows // size][:, columns // size]


def _two_of_four(matrix: Tensor, name_key: int) -> Tensor:
    """The two with the smallest hashes of every four neighbours in a row; a rank that has some of
    the four draws for all."""
    here = elements(matrix)
    first = here - here % 4  # rows are multiples of four long
    own = element_hashes(name_key, here) ^ _HASH_SIGN
    smaller = torch.zeros_like(here)
    for neighbour in range(4):
        smaller += (element_hashes(name_key, first + neighbour) ^ _HASH_SIGN) < own
    return smaller < 2


def element_hashes(key: int, elements: Tensor) -> Tensor:
    """`hashing.combine(key, elements)`: no two elements of one key have the same."""
    return _mix(elements ^ _signed(int(mix(key))))


def _mix(values: Tensor) -> Tensor:
    """`hashing.mix`; sums and products wrap around."""
    z = values + _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_M1)
    z = (z ^ _shifted(z, 27)) * _signed(_M2)
    return z ^ _shifted(z, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left; torch's own repeats the sign."""
    return (values >> bits) & ((1 << (_BITS - bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << _BITS) if bits >> (_BITS - 1) else bits


_PLACE_BITS = 32
_LARGEST = 0x7FFFFFFF
"""The bits of an fp32 number without its sign, at most."""
_NEVER = -1
"""The largest key: of elements that are not to be chosen."""
_LATER = -(1 << 63)
"""The highest bit of a key."""


def drop_fraction(config: RiglConfig, step: int, steps: int) -> float:
    """Return the share of weights that a step of a phase replaces; 0 if it changes no masks."""
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
    order of their hashes, then the smallest of the others become zero. Collective likewise."""
    place = elements(matrix)
    drawn = element_hashes(name_key, place) & (_LARGEST << _PLACE_BITS)
    keys = torch.where(mask, drawn | place, _LATER | _by_size(local(matrix)) | place)
    return smallest([matrix], [keys], [count])[0]


def _by_size(values: Tensor) -> Tensor:
    """The bits of absolute values, which are in the order of the values, above those of a place."""
    bits = values.detach().float().abs().contiguous().view(torch.int32)
    return bits.long() << _PLACE_BITS
