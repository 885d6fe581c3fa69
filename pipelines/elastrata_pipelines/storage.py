"""Storage: files below one root, local or remote (`s3://`, `gs://`... through fsspec), written
whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.url_secrets import NO_SECRET, hide_unrecorded_parts
from elastrata_pipelines.waits import open_file_system

_CHUNK_BYTES = 4 * 2**20
_ABSENT = (404, 410)
"""Status codes of HTTP for a file that does not exist."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXT = re.compile(r"No space left on device|Disk quota exceeded")
"""How libraries that hide the number of an error say that a disk is full."""


def is_local(url: str) -> bool:
    """Return whether a URL names a local place: a path, or a URL such as `file:///folder`."""
    return url.startswith(("/", "file://", "local://")) or "://" not in url


def locate(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the path in it.

    Raises:
        UserError: the URL holds a secret, which would be recorded, or its server does not answer.
    """
    if (hidden := hide_unrecorded_parts(url)) != url:
        raise UserError(f"{hidden}: {NO_SECRET}")
    if not is_local(url):
        return _open_remote(url)
    # A local path is taken literally: fsspec itself would read `a::b` as a chain of URLs.
    local = fsspec.filesystem("file")
    return local, str(local._strip_protocol(url))


def is_absent(error: Exception) -> bool:
    """Return whether a file system's error says that a file does not exist.

    fsspec's HTTP file system raises FileNotFoundError if a server cannot be reached, too.
    """
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
    response = getattr(cause, "response", None)
    status = getattr(cause, "status", getattr(response, "status_code", None))
    if status is not None:
        return status in _ABSENT
    is_other = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, FileNotFoundError) and not is_other


def _open_remote(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    protocol = url.partition("://")[0]
    known = sorted({*fsspec.available_protocols(), *fsspec.registry})  # and those registered later
    if protocol.partition("::")[0] not in known:
        hint = (
            suggest_nearest(protocol, known) or "; expected s3://, gs:// or another one of fsspec"
        )
        raise UserError(f"{url}: no storage has URLs that begin with {protocol}://{hint}")
    try:
        return open_file_system(url)
    except Exception as error:  # such as a package that is missing
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise UserError(f"{url}: cannot be read ({reason or type(error).__name__})") from error


@dataclass(frozen=True)
class Storage:
    """A folder named by a path or URL. Methods take paths relative to it."""

    url: str

    @cached_property
    def _located(self) -> tuple[fsspec.AbstractFileSystem, str]:
        fs, root = locate(os.fspath(self.url))
        return fs, root.rstrip("/")

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """File system of the root."""
        return self._located[0]

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine."""
        protocol = self.fs.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def path(self, *parts: str) -> str:
        """Return the path of `parts` below the root, as the file system names it."""
        return "/".join((self._located[1], *parts))

    def uri(self, *parts: str) -> str:
        """Return the full URL of `parts` below the root, or a plain absolute path if it is
        local."""
        return (
            self.path(*parts) if self.is_local else str(self.fs.unstrip_protocol(self.path(*parts)))
        )

    def sub(self, *parts: str) -> Storage:
        """Return the folder `parts` below the root."""
        return Storage(self.uri(*parts))

    def exists(self, *parts: str) -> bool:
        """Return whether a file or folder exists."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path(*parts)))

    def names(self, *parts: str) -> list[str]:
        """Return the sorted names directly below `parts`; empty if the folder does not exist."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(*parts), detail=False)
        except FileNotFoundError:
            return []
        # Object stores may list the folder itself.
        entries = {str(entry).rstrip("/") for entry in found}
        return sorted(entry.rsplit("/", 1)[-1] for entry in entries - {self.path(*parts)})

    def size(self, *parts: str) -> int:
        """Return the size of a file in bytes."""
        try:
            size = self.fs.size(self.path(*parts))
        except FileNotFoundError as error:
            if is_absent(error):
                raise
            raise OSError(str(error.__cause__)) from None
        # A server need not say it in advance.
        return len(self.read(*parts)) if size is None else int(size)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all files below the root, by relative path."""
        self.fs.invalidate_cache()
        root = self.path()
        # A store returns a thousand sizes with each request.
        files = self.fs.find(root, detail=True)
        return {
            path.removeprefix(root).lstrip("/"): int(file["size"]) for path, file in files.items()
        }

    def read(self, *parts: str) -> bytes:
        """Return all bytes of a file."""
        return cast(bytes, self.fs.cat_file(self.path(*parts)))

    def write(self, data: bytes | bytearray, *parts: str) -> None:
        """Write a file completely or not at all: readers never see a part of it."""
        with self.create(*parts) as stream:
            stream.write(data)

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing, which appears when the block ends without an error."""
        if not self.is_local:
            remote = self.fs.open(self.path(*parts), "wb")
            try:
                yield remote
            except BaseException:
                _discard(remote)
                raise
            remote.close()
            return
        target = Path(self.path(*parts))
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a rename is atomic inside one file system only.
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        with name_full_disk(target):
            try:
                with temporary.open("wb") as stream:
                    yield stream
                    stream.flush()
                    # Else a crash of the machine could leave an empty file under the final name.
                    os.fsync(stream.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

    def open(self, *parts: str) -> Any:
        """Open a file for reading, with `seek`. A remote file is prefetched in megabytes."""
        return self.fs.open(self.path(*parts), "rb")

    def open_scattered(self, *parts: str) -> Any:
        """Open a file to read distant pieces: only the requested bytes are fetched."""
        options = {} if self.is_local else {"cache_type": "none"}
        return self.fs.open(self.path(*parts), "rb", **options)

    def delete(self, *parts: str) -> None:
        """Delete a file, a link, or a folder with its content; do nothing if it does not exist."""
        if self.is_local and Path(self.path(*parts)).is_symlink():
            # Deletes the link, not its target.
            Path(self.path(*parts)).unlink()
        elif self.exists(*parts):
            self.fs.rm(self.path(*parts), recursive=True)

    @contextmanager
    def removing_empty_folders(self) -> Iterator[None]:
        """Run the block, then remove empty local folders that it created on the path to this
        one."""
        path = Path(self.path())
        missing = (
            [one for one in (path, *path.parents) if not one.exists()] if self.is_local else []
        )
        try:
            yield
        finally:
            for folder in missing:
                # Another command may use the folder, or may have removed it.
                with suppress(OSError), _locked(folder) as is_alone:
                    if is_alone:
                        folder.rmdir()

    @contextmanager
    def hold_lock(self) -> Iterator[bool]:
        """Create the folder, and hold its only lock during the block.

        Yields:
            False if another process holds the lock. True for remote folders and file systems
            without locks, which cannot be locked.
        """
        if not self.is_local:
            yield True
            return
        folder = Path(self.path())
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder) as is_alone:
                # None: the folder was removed after it was created, so try again.
                if is_alone is not None:
                    yield is_alone
                    return

    def sha256(self, *parts: str) -> str:
        """Return the SHA-256 of a file, as `sha256sum` prints it."""
        digest = hashlib.sha256()
        with self.open(*parts) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Hold the lock of a folder; yield None if the folder was removed before it was locked."""
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
        # NFS and some FUSE mounts cannot lock folders.
        except OSError:
            pass
        # The lock may be on a folder that was removed, or replaced, between open() and flock().
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            is_alone = None
        yield is_alone
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a local file completely or not at all.

    Raises:
        OSError: the file cannot be written; its previous content stays.
    """
    # Keeps a link, and replaces its target. Half a recipe would describe another model, and half a
    # trace would lack events.
    place = path.resolve()
    if place.exists() and not place.is_file():
        # A pipe or /dev/stdout, which must not be replaced by a file.
        place.write_bytes(data)
        return
    try:
        Storage(str(place.parent)).write(data, place.name)
    except OSError as error:
        error.filename = str(path)  # not that of a temporary file
        raise


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Run a block that writes to a local path. A full disk, which libraries report in ways of their
    own, becomes an OSError with the path, the disk and its free bytes."""
    try:
        yield
    except Exception as error:
        number = _full_number(error)
        if number is None:
            raise
        raise OSError(number, f"{os.strerror(number)}: {describe_disk(path)}", str(path)) from error


def _full_number(error: BaseException | None) -> int | None:
    """Return the number of the error of a full disk that caused an error, if one did."""
    # torch reports a failed write as "unexpected pos", and safetensors as an error of its own.
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error.errno
        if _FULL_TEXT.search(str(error)):
            return errno.ENOSPC
        error = error.__cause__ or error.__context__
    return None


def describe_disk(path: Path) -> str:
    """Return which disk holds a path, and its free bytes."""
    place = path.absolute()
    while not os.path.ismount(place) and place != place.parent:
        place = place.parent
    free = os.statvfs(place)
    return f"the disk mounted at {place} has {free.f_bavail * free.f_frsize:,} bytes free"


def _discard(stream: Any) -> None:
    """Close a remote file so that nothing of it appears, if its file system supports that."""
    if not hasattr(stream, "discard"):
        stream.close()
        return
    stream.discard()
    # close() would upload the buffer that discard() has dropped, and raise an error that hides the
    # original one.
    stream.closed = True
