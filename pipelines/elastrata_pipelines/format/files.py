"""Files of a data set: writes them with checksums, and checks their sizes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, TYPE_CHECKING

from elastrata_pipelines.checked_json import file_size
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.manifest import FileEntry, Manifest
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_REMOTE_FILES_AT_ONCE = 16
# Listing a large data set takes fewer requests than asking for each file.
_REMOTE_FILES_ASKED_FOR = 64
"""Number of remote files above which the store's listing is used."""


class CheckedStream(io.RawIOBase):
    """Stream that forwards all writes to another one, and records size and checksum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        # Computed from memory, before a disk or store can damage the bytes.
        self._digest = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer) -> int:
        """Write all of `data`."""
        self._digest.update(data)
        size = memoryview(data).nbytes
        self._size += size
        self._stream.write(data)
        return size

    def entry(self, path: str, *, samples: int = 0, stripes: int = 0) -> FileEntry:
        """Return the manifest entry of the file, with the name `path` in the data set."""
        return FileEntry(
            path=path,
            bytes=self._size,
            sha256=self._digest.hexdigest(),
            samples=samples,
            stripes=stripes,
        )


def write_file(storage: Storage, path: str, data: bytes) -> FileEntry:
    """Write a file completely or not at all, and return its manifest entry."""
    with storage.create(path) as stream:
        checked = CheckedStream(stream)
        checked.write(data)
    return checked.entry(path)


def file_problems(storage: Storage, manifest: Manifest) -> list[str]:
    """Return the problems of a data set's files, judged by their sizes only."""
    entries: Iterable[FileEntry] = manifest.files
    if not storage.is_local and len(manifest.files) > _REMOTE_FILES_ASKED_FOR:
        entries = _entries_to_check(storage, manifest.files)
    look = partial(file_problem, storage)
    if storage.is_local:
        problems = list(map(look, entries))
    else:
        with ThreadPoolExecutor(_REMOTE_FILES_AT_ONCE) as threads:
            problems = list(threads.map(look, entries))
    return [problem for problem in problems if problem]


def _entries_to_check(storage: Storage, entries: Sequence[FileEntry]) -> Iterable[FileEntry]:
    """Return the files whose size in the store's listing is wrong or missing; all if the listing
    fails."""
    try:
        sizes = storage.sizes()
    # Every kind of store raises errors of other classes.
    except Exception:
        return entries
    return [entry for entry in entries if sizes.get(entry.path) != entry.bytes]


def file_problem(storage: Storage, entry: FileEntry) -> str | None:
    """Return the problem of a file's size in one line; None if it is correct."""
    where = storage.uri(entry.path)
    try:
        size = file_size(storage, entry.path)
    except FileNotFoundError:
        return f"{where}: missing"
    except UserError as error:
        return str(error)
    return (
        None if size == entry.bytes else f"{where}: {size} bytes, the manifest says {entry.bytes}"
    )
