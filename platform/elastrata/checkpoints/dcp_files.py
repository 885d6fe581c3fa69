"""A file system for DCP over a `CommitStorage`; hashes what is written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystemBase
from typing_extensions import override

from elastrata.checkpoints.commit import FileRecord
from elastrata.checkpoints.commit_storage import CommitStorage


class HashingStream(io.RawIOBase):
    """A stream for writing that counts what goes through it and, if asked to, hashes it."""

    def __init__(self, raw: IO[bytes], *, hashed: bool) -> None:
        self._raw = raw
        self._digest = hashlib.sha256() if hashed else None
        self._size = 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        """Writes all of `data`, an object with the buffer protocol; returns its bytes."""
        view = memoryview(data).cast("B")
        self._raw.write(view)
        if self._digest:
            self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    @override
    def tell(self) -> int:
        return self._size

    @property
    def record(self) -> FileRecord:
        """Size of all that was written, and its SHA-256 if it was hashed."""
        return FileRecord(
            size=self._size, sha256=self._digest.hexdigest() if self._digest else None
        )


class StorageFiles(FileSystemBase):
    """A file system for DCP. Paths are relative to the root of the storage."""

    def __init__(self, storage: CommitStorage, *, hashed: bool = True) -> None:
        self._storage = storage
        self._hashed = hashed
        self.records: dict[str, FileRecord] = {}
        """The files that were written completely, by path."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path = os.fspath(path)
        if mode == "rb":
            with self._storage.open(path) as stream:
                yield stream
            return
        with self._storage.create(path) as raw:
            hashing = HashingStream(raw, hashed=self._hashed)
            yield hashing
        self.records[path] = hashing.record

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    @override
    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    @override
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Folders appear with their first file."""

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._storage.exists(os.fspath(path))

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("object stores cannot rename")

    @override
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._storage.delete(os.fspath(path))

    @override
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
