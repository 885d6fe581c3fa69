"""The hashes of `elastrata_pipelines.hashing` in torch: bit for bit, on any device.

Torch has few operations on unsigned integers: a hash is an int64 with the same 64 bits.
"""

from __future__ import annotations

from torch import Tensor

from elastrata_pipelines.hashing import mix

_BITS = 64
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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
