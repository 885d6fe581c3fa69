"""The index of lengths: a file as NumPy saves it, read without trusting what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.checked_json import file_size, reason
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"\{'descr': '<i4', 'fortran_order': (?:False|True), 'shape': \((\d{1,19}),\), \} *\n",
    re.DOTALL,
)
"""The bytes that NumPy writes before a row of int32: magic, version, the header's length, the
header. NumPy's own reader evaluates the header as Python and takes as much memory as that asks
for."""
_FIXED_BYTES = 10
_MOST_HEADER_BYTES = 4096
_ITEM_BYTES = 4
_AT_ONCE = 2**24


def read_int32(storage: Storage, path: str, count: int) -> npt.NDArray[np.int32]:
    """The numbers in a file that `numpy.save` wrote, shape [count], int32, read-only.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is no such file, has not so many numbers, or cannot be read.
    """
    with _opened(storage, path, count) as stream:
        return np.frombuffer(stream.read(count * _ITEM_BYTES), "<i4", count)


def check_int32(storage: Storage, path: str, count: int) -> None:
    """Raises what `read_int32` does, but reads the file's header alone."""
    with _opened(storage, path, count):
        pass


@contextmanager
def _opened(storage: Storage, path: str, count: int) -> Iterator[IO[bytes]]:
    """The file, at the first of its numbers."""
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
    except Exception as error:  # each kind of store has its own
        raise UserError(f"{where}: cannot be read ({reason(error)})") from None


def _header_bytes(head: bytes, count: int) -> int:
    """How many bytes come before the numbers."""
    header = _HEADER.match(head)
    if header is None or int.from_bytes(header[1], "little") != header.end() - _FIXED_BYTES:
        raise ValueError("not an array of int32")
    if int(header[2]) != count:
        raise ValueError(f"{int(header[2])} numbers, expected {count}")
    return header.end()


def histogram_of(lengths: npt.NDArray[np.int32], most: int) -> tuple[int, ...]:
    """`histogram[s]`: how many of the lengths are s, for s from 0 to `most`; empty where one is not
    in that range."""
    if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        return ()
    counts = np.zeros(most + 1, np.int64)
    for first in range(0, len(lengths), _AT_ONCE):  # NumPy counts in a copy twice as large
        counts += np.bincount(lengths[first : first + _AT_ONCE], minlength=most + 1)
    return tuple(counts.tolist())
