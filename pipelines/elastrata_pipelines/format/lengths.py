"""The index of lengths: a NumPy file that is read without trusting its header."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.checked_json import describe_error, file_size
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

# NumPy's own reader evaluates the header as Python, and allocates as much memory as it asks for.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"\{'descr': '<i4', 'fortran_order': (?:False|True), 'shape': \((\d{1,19}),\), \} *\n",
    re.DOTALL,
)
"""Bytes that NumPy writes before one dimension of int32: magic, version, header length and
header."""
_FIXED_BYTES = 10
_MOST_HEADER_BYTES = 4096
_ITEM_BYTES = 4
_AT_ONCE = 2**24


def read_int32(storage: Storage, path: str, count: int) -> npt.NDArray[np.int32]:
    """Return the numbers in a file that `numpy.save` wrote, shape [count], int32, read-only.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: the file is of another kind, holds another number of values, or cannot be read.
    """
    with _open_checked(storage, path, count) as stream:
        return np.frombuffer(stream.read(count * _ITEM_BYTES), "<i4", count)


def check_int32(storage: Storage, path: str, count: int) -> None:
    """Check the header of a file; raises the same errors as `read_int32`."""
    with _open_checked(storage, path, count):
        pass


@contextmanager
def _open_checked(storage: Storage, path: str, count: int) -> Iterator[IO[bytes]]:
    """Open the file at the first of its numbers."""
    where = storage.uri(path)
    size = file_size(storage, path)
    try:
        with storage.open(path) as stream:
            begin = _header_bytes(stream.read(_MOST_HEADER_BYTES), count)
            if size != begin + count * _ITEM_BYTES:
                raise ValueError(f"{size} bytes, expected {begin + count * _ITEM_BYTES}")
            stream.seek(begin)
            yield stream
    except FileNotFoundError:
        raise
    # Every kind of store raises errors of other classes.
    except Exception as error:
        raise UserError(f"{where}: cannot be read ({describe_error(error)})") from None


def _header_bytes(head: bytes, count: int) -> int:
    """Return the number of bytes before the numbers."""
    header = _HEADER.match(head)
    if header is None or int.from_bytes(header[1], "little") != header.end() - _FIXED_BYTES:
        raise ValueError("not an array of int32")
    if int(header[2]) != count:
        raise ValueError(f"{int(header[2])} numbers, expected {count}")
    return header.end()


def histogram_of(lengths: npt.NDArray[np.int32], most: int) -> tuple[int, ...]:
    """Return `histogram[s]`, the number of lengths equal to s, for s from 0 to `most`.

    The result is empty if a length is outside that range.
    """
    if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        return ()
    counts = np.zeros(most + 1, np.int64)
    # NumPy counts a copy that is twice as large.
    for first in range(0, len(lengths), _AT_ONCE):
        counts += np.bincount(lengths[first : first + _AT_ONCE], minlength=most + 1)
    return tuple(counts.tolist())
