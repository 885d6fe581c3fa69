"""Masks drawn at random: the same on any number of ranks, in any layout.

Whether a weight is held at zero follows from hashes of (seed, parameter's name, place in the
matrix) alone: no rank needs to know more of a matrix than its shard, and none draws in a sequence.
A mask is true where the weight is held at zero.

The hashes are those of `elastrata_pipelines.hashing`, bit for bit, on any device. Torch has few
operations on unsigned integers: a hash is an int64 with the same 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from elastrata.core.sharding import local
from elastrata.core.sparsity.config import AnySparsity, BlockConfig, TwoFourConfig
from elastrata.core.sparsity.shards import elements, in_portions, rows_and_columns, smallest
from elastrata_pipelines.hashing import key, mix, text_hash

_SIGN = -(1 << 63)
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
    order = torch.argsort(element_hashes(name_key, numbers) ^ _SIGN)
    zero = torch.zeros_like(numbers, dtype=torch.bool)
    zero[order[: round(level * len(numbers))]] = True
    rows, columns = rows_and_columns(matrix)
    return zero.view(num_rows, num_columns)[rows // size][:, columns // size]


def _two_of_four(matrix: Tensor, name_key: int) -> Tensor:
    """The two with the smallest hashes of every four neighbours in a row; a rank that has some of
    the four draws for all."""
    here = elements(matrix)
    first = here - here % 4  # rows are multiples of four long
    own = element_hashes(name_key, here) ^ _SIGN
    smaller = torch.zeros_like(here)
    for neighbour in range(4):
        smaller += (element_hashes(name_key, first + neighbour) ^ _SIGN) < own
    return smaller < 2


def element_hashes(key: int, elements: Tensor) -> Tensor:
    """`hashing.combine(key, elements)`: no two elements of one key have the same.

    Args:
        key: 64 bits, such as `hashing.key` gives.
        elements: int64, at least 0, of any shape.
    """
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
