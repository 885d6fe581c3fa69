"""A binary column: raw integers of every row, end to end, uncopied."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def offsets_of(column: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """Where each row's bytes begin, and where those of the last one end, shape [rows + 1]."""
    if len(column) == 0:
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    return offsets[column.offset : column.offset + len(column) + 1]


def values_of(column: pa.LargeBinaryArray, dtype: str) -> npt.NDArray[Any]:
    """The bytes of all rows as little-endian integers of NumPy's type `dtype`."""
    ends = offsets_of(column)
    values = column.buffers()[2]
    used = (
        np.frombuffer(values, np.uint8)[ends[0] : ends[-1]] if ends[-1] else np.empty(0, np.uint8)
    )
    return used.view(np.dtype(dtype).newbyteorder("<"))
