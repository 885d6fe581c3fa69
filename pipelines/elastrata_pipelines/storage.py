"""Files under one root, local or remote (`s3://`, `gs://`... by fsspec), written whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.core import url_to_fs

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.url_secrets import NO_SECRET, without_secrets

_CHUNK_BYTES = 4 * 2**20


def is_local(url: str) -> bool:
    """Whether it names a place on this machine: a path, or a URL such as `file:///folder`."""
    return url.startswith(("/", "file://", "local://")) or "://" not in url


def locate(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path in it.

    A local path is taken as it is: fsspec itself would read `a::b` as a chain of URLs.

    Raises:
        UserError: the URL holds a secret: what is opened is recorded, too.
    """
    if (hidden := without_secrets(url)) != url:
        raise UserError(f"{hidden}: {NO_SECRET}")
    if not is_local(url):
        fs, path = url_to_fs(url)
        return fs, str(path)
    local = fsspec.filesystem("file")
    return local, str(local._strip_protocol(url))


@dataclass(frozen=True)
class Storage:
    """A folder named by a path or URL. Paths given to its methods are relative to it."""

    url: str

    @cached_property
    def _located(self) -> tuple[fsspec.AbstractFileSystem, str]:
        fs, root = locate(os.fspath(self.url))
        return fs, root.rstrip("/")

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The file system the root lies in."""
        return self._located[0]

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        protocol = self.fs.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def path(self, *parts: str) -> str:
        """The path of `parts` below the root, as the file system itself names it."""
        return "/".join((self._located[1], *parts))

    def uri(self, *parts: str) -> str:
        """The full URL of `parts` below the root; a plain absolute path where it is local."""
        return (
            self.path(*parts) if self.is_local else str(self.fs.unstrip_protocol(self.path(*parts)))
        )

    def sub(self, *parts: str) -> Storage:
        """The folder `parts` below the root."""
        return Storage(self.uri(*parts))

    def exists(self, *parts: str) -> bool:
        """Whether there is a file or folder."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path(*parts)))

    def names(self, *parts: str) -> list[str]:
        """The names directly below `parts`, sorted; empty where there is no such folder."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(*parts), detail=False)
        except FileNotFoundError:
            return []
        entries = {str(entry).rstrip("/") for entry in found}
        return sorted(entry.rsplit("/", 1)[-1] for entry in entries - {self.path(*parts)})

    def size(self, *parts: str) -> int:
        """Bytes of a file."""
        return int(self.fs.size(self.path(*parts)))

    def sizes(self) -> dict[str, int]:
        """Bytes of every file in it and below, by the path from here; a store tells a thousand with
        each request."""
        self.fs.invalidate_cache()
        root = self.path()
        files = self.fs.find(root, detail=True)
        return {
            path.removeprefix(root).lstrip("/"): int(file["size"]) for path, file in files.items()
        }

    def read(self, *parts: str) -> bytes:
        """All bytes of a file."""
        return cast(bytes, self.fs.cat_file(self.path(*parts)))

    def write(self, data: bytes | bytearray, *parts: str) -> None:
        """Writes a file whole or not at all: a reader never sees half of it."""
        with self.create(*parts) as stream:
            stream.write(data)

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        """Opens a new file for writing that appears, whole, when the block ends without error."""
        if not self.is_local:
            remote = self.fs.open(self.path(*parts), "wb")
            try:
                yield remote
            except BaseException:
                _abandon(remote)
                raise
            remote.close()
            return
        target = Path(self.path(*parts))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with temporary.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def open(self, *parts: str) -> Any:
        """Opens a file for reading, seekable. A remote one is read ahead, by megabytes."""
        return self.fs.open(self.path(*parts), "rb")

    def open_scattered(self, *parts: str) -> Any:
        """Opens a file to read pieces that lie far apart: no more is fetched than is asked for."""
        own = {} if self.is_local else {"cache_type": "none"}
        return self.fs.open(self.path(*parts), "rb", **own)

    def delete(self, *parts: str) -> None:
        """Deletes a file, a link, or a folder with all that is in it; nothing happens where it is
        gone."""
        if self.is_local and Path(self.path(*parts)).is_symlink():
            Path(self.path(*parts)).unlink()  # the link, wherever it leads
        elif self.exists(*parts):
            self.fs.rm(self.path(*parts), recursive=True)

    @contextmanager
    def without_leftovers(self) -> Iterator[None]:
        """Run the block, then remove the local folders that it has made on the way to this one and
        left empty."""
        path = Path(self.path())
        missing = (
            [one for one in (path, *path.parents) if not one.exists()] if self.is_local else []
        )
        try:
            yield
        finally:
            for folder in missing:
                with suppress(OSError), _locked(folder) as is_alone:  # another command's, or gone
                    if is_alone:
                        folder.rmdir()

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Hold the only lock on the folder, which is made, for the time of the block.

        Yields:
            False if another process holds it. A remote folder, or one of a file system that has no
            locks, cannot be locked: True.
        """
        if not self.is_local:
            yield True
            return
        folder = Path(self.path())
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder) as is_alone:
                if is_alone is not None:
                    yield is_alone
                    return

    def sha256(self, *parts: str) -> str:
        """The SHA-256 of a file, as `sha256sum` prints it."""
        digest = hashlib.sha256()
        with self.open(*parts) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Hold the lock of a folder; None if the folder was removed before it was locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        is_alone: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
        except OSError:  # NFS and some FUSE mounts lock no folders
            pass
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            is_alone = None
        yield is_alone
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of this machine that somebody reads later: whole or not at all, as half a recipe
    is one of another model, and half a trace one of fewer events.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    place = path.resolve()  # a link stays one
    if place.exists() and not place.is_file():
        place.write_bytes(data)  # a pipe or /dev/stdout, which nothing may replace
    else:
        Storage(str(place.parent)).write(data, place.name)


def _abandon(stream: Any) -> None:
    """Closes a remote file so that nothing of it appears, where its file system knows how to."""
    if not hasattr(stream, "discard"):
        stream.close()
        return
    stream.discard()
    # close() would upload the buffer that discard() has dropped, and hide the error behind its own.
    stream.closed = True
