"""Stable 64-bit hashes: the only source of randomness in order, split, masks and digests.

All functions are arithmetic on unsigned 64-bit integers, so results do not depend on the platform,
the version of NumPy or the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK_CHARACTERS = 2**20


def text_hash(*parts: str | bytes) -> int:
    """Return a 64-bit hash of `parts` that respects their boundaries: ("ab", "c") differs from
    ("a", "bc")."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        size = utf8_size(part) if isinstance(part, str) else len(part)
        # The size in front of each part preserves the boundaries.
        digest.update(size.to_bytes(8, "little"))
        # Encoded in blocks, because a document may be large.
        for block in _utf8_blocks(part) if isinstance(part, str) else (part,):
            digest.update(block)
    return int.from_bytes(digest.digest(), "little")


def utf8_size(text: str) -> int:
    """Return the number of bytes of a text as UTF-8, without a full copy of it."""
    return len(text) if text.isascii() else sum(map(len, _utf8_blocks(text)))


def _utf8_blocks(text: str) -> Iterator[bytes]:
    for begin in range(0, len(text), _BLOCK_CHARACTERS):
        yield text[begin : begin + _BLOCK_CHARACTERS].encode()


def mix(values: npt.ArrayLike) -> U64:
    """Return SplitMix64's output function (Steele, Lea and Flood, 2014) of each element."""
    z = np.asarray(values, dtype=np.uint64)
    # Arithmetic modulo 2^64 overflows on purpose.
    with np.errstate(over="ignore"):
        z = z + np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
        return z ^ (z >> np.uint64(31))


def mix_one(value: int) -> int:
    """Return `mix` of one integer below 2^64."""
    # For a single value, NumPy's overhead takes ten times as long.
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _M1) & _MASK
    z = ((z ^ (z >> 27)) * _M2) & _MASK
    return z ^ (z >> 31)


def key(*parts: int) -> int:
    """Return one 64-bit key of several integers, for example (seed, epoch, window)."""
    value = 0
    for part in parts:
        value = combine_one(value, part & _MASK)
    return value


def combine(keys: npt.ArrayLike, values: npt.ArrayLike) -> U64:
    """Return a hash of each pair (key, value); the arguments broadcast against each other."""
    return mix(mix(keys) ^ np.asarray(values, dtype=np.uint64))


def combine_one(key: int, value: int) -> int:
    """Return `combine` of one pair of integers below 2^64."""
    return mix_one(mix_one(key) ^ value)


def uniform(hashes: U64) -> npt.NDArray[np.float64]:
    """Map 64-bit hashes to [0, 1) by their upper 53 bits."""
    # A double has 53 bits of precision.
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform_one(hashed: int) -> float:
    """Return `uniform` of one integer below 2^64."""
    return (hashed >> 11) * 2.0**-53


def permutation(n: int, seed_key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of 0..n-1 that depends only on `n` and `seed_key`."""
    return np.argsort(combine(seed_key, np.arange(n, dtype=np.uint64)), kind="stable")


def digest(sample_ids: U64) -> int:
    """Return an order-independent 64-bit digest: the sum of the samples' hashes modulo 2^64.

    The digests of a step's parts add up (modulo 2^64) to the digest of the step, so each rank can
    compute its own part before a reduction.
    """
    return int(np.sum(mix(sample_ids), dtype=np.uint64))
