"""Checksums of what is meant to be written, taken before any store can damage it."""

from __future__ import annotations

import hashlib
import io
from typing import IO, TYPE_CHECKING

from elastrata_pipelines.format.manifest import FileEntry
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class CheckedStream(io.RawIOBase):
    """A stream that passes everything on to another one and keeps its size and checksum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: ReadableBuffer) -> int:
        """Writes all of `data`."""
        self._digest.update(data)
        size = memoryview(data).nbytes
        self._size += size
        self._stream.write(data)
        return size

    def entry(self, path: str, *, samples: int = 0, stripes: int = 0) -> FileEntry:
        """The manifest's entry of the file, `path` being its name in the data set."""
        return FileEntry(
            path=path,
            bytes=self._size,
            sha256=self._digest.hexdigest(),
            samples=samples,
            stripes=stripes,
        )


def write_file(storage: Storage, path: str, data: bytes) -> FileEntry:
    """Writes a file, whole or not at all, and returns its manifest entry."""
    with storage.create(path) as stream:
        checked = CheckedStream(stream)
        checked.write(data)
    return checked.entry(path)
