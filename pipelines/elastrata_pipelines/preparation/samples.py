"""Samples: tokenised sequences, end to end, between the tokenizer and a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastrata_pipelines.format import shard_schema
from elastrata_pipelines.hashing import U64

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """n samples with T tokens in total."""

    ids: U64
    """Shape [n]."""
    lengths: Ints
    """Shape [n]; sums to T."""
    tokens: Tokens
    """Shape [T], of the data set's token type."""
    extras: tuple[bytes, ...] | None = None
    """Other bytes that a shard stores of each sample. Packed data: the boundaries (int32 each).
    Pairs: start of the second sentence (int32), and whether it follows the first (one byte)."""

    def __len__(self) -> int:
        return len(self.ids)


def concatenate(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts, in order; at least one part is required."""
    if len(parts) == 1:
        return parts[0]
    extras = [part.extras for part in parts if part.extras is not None]
    return Samples(
        ids=np.concatenate([part.ids for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        extras=tuple(extra for part in extras for extra in part) if extras else None,
    )


def pair_extra(second_start: int, is_next: bool) -> bytes:
    """Return the bytes that a shard stores of a sentence pair."""
    return second_start.to_bytes(4, "little") + bytes([is_next])


def stripe_table(
    ids: U64,
    lengths: npt.NDArray[np.integer],
    tokens: Sequence[bytes],
    extras: Sequence[bytes],
    *,
    packed: bool,
    pairs: bool,
) -> pa.Table:
    """Return a stripe as a shard stores it; arguments are in stored order, one entry per sample."""
    columns: list[pa.Array] = [pa.array(ids), pa.array(lengths.astype(np.int32)), _binary(tokens)]
    if packed:
        columns.append(_binary(extras))
    if pairs:
        both = np.frombuffer(b"".join(extras), dtype=[("start", "<i4"), ("next", "?")])
        # Copies, because fields of a structured array are strided.
        columns += [pa.array(both["start"].copy()), pa.array(both["next"].copy())]
    return pa.Table.from_arrays(columns, schema=shard_schema(packed=packed, pairs=pairs))


def _binary(values: Sequence[bytes]) -> pa.LargeBinaryArray:
    ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(values), buffers)
