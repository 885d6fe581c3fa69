"""The storage that commits lie in: the methods they need of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import IO, Any, Protocol


class CommitStorage(Protocol):
    """Files below a root, each written whole: on disk, in an object store, or in memory.

    `elastrata_pipelines.storage.Storage` says what the methods do.
    """

    @property
    def url(self) -> str:
        """The name of the root in messages."""
        ...

    def uri(self, *parts: str) -> str:
        """The name of a path below the root in messages."""
        ...

    def names(self, *parts: str) -> list[str]:
        """The names directly below a folder, sorted; looks afresh."""
        ...

    def exists(self, *parts: str) -> bool:
        """Whether there is a file or folder; looks afresh."""
        ...

    def size(self, *parts: str) -> int:
        """Bytes of a file; as the last look saw it where there was one."""
        ...

    def sha256(self, *parts: str) -> str:
        """The SHA-256 of a file, as `sha256sum` prints it."""
        ...

    def read(self, *parts: str) -> bytes:
        """All bytes of a file."""
        ...

    def open(self, *parts: str) -> Any:
        """Opens a file for reading, seekable."""
        ...

    def write(self, data: bytes, *parts: str) -> None:
        """Writes a file whole or not at all."""
        ...

    def create(self, *parts: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a new file that appears, whole, when the block ends without error."""
        ...

    def delete(self, *parts: str) -> None:
        """Deletes a file, or a folder with all that is in it."""
        ...
