"""The files of a data set: written with a checksum, taken before any store can damage them, and
looked at by their sizes."""

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
_REMOTE_FILES_ASKED_FOR = 64
"""Of more files a store is asked for its list, not for each of them."""


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


def file_problems(storage: Storage, manifest: Manifest) -> list[str]:
    """The problems of a data set's files, by their sizes alone."""
    entries: Iterable[FileEntry] = manifest.files
    if not storage.is_local and len(manifest.files) > _REMOTE_FILES_ASKED_FOR:
        entries = _not_as_listed(storage, manifest.files)
    look = partial(file_problem, storage)
    if storage.is_local:
        problems = list(map(look, entries))
    else:
        with ThreadPoolExecutor(_REMOTE_FILES_AT_ONCE) as threads:
            problems = list(threads.map(look, entries))
    return [problem for problem in problems if problem]


def _not_as_listed(storage: Storage, entries: Sequence[FileEntry]) -> Iterable[FileEntry]:
    """Those that a store's list has not, or has with another size; all where it gives no list."""
    try:
        sizes = storage.sizes()
    except Exception:  # each kind of store has its own
        return entries
    return [entry for entry in entries if sizes.get(entry.path) != entry.bytes]


def file_problem(storage: Storage, entry: FileEntry) -> str | None:
    """The problem of a data set's file, by its size alone, in one line; None: there is none."""
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
