"""Local files: the regular files that a local path denotes, and other entries that it finds."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import has_magic
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from typing_extensions import override

from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import escape_unprintable

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_CARDS_OF_THE_HUB = {
    "README.md", "config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json",
    "dummy_data.zip",
}  # fmt: skip
"""Files that the `datasets` library never reads as data."""
_PYTHON = (".py", ".pyi", ".pyx", ".pxd")
"""Endings of files whose names, and those of their folders, often begin with `_`."""


@dataclass
class LocalFiles:
    """The files that a path denotes."""

    base: str
    """Folder to which the names of files, which identify samples, are relative."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each regular file, by path, in order."""
    sidecars: list[str] = field(default_factory=list)
    """Paths of files and folders that were passed over, see `is_sidecar`."""
    others: list[str] = field(default_factory=list)
    """One line for each entry of a folder, or match of a glob, that cannot be read as a file."""


def find_local(path: str) -> LocalFiles:
    """Return the files that an absolute path denotes: itself, those below it, or those it matches.

    Raises:
        OSError: the path is no file, folder or glob, or cannot be read.
    """
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        if os.path.lexists(path):
            raise OSError("a link to something that is not there") from None
        return _match_glob(path) if has_magic(path) else LocalFiles(path)
    if stat.S_ISDIR(status.st_mode):
        return _Walk(path).files()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{_kind(status)}, expected a file or folder")
    return LocalFiles(_folder(path), {path: status.st_size})


def is_sidecar(path: str, pattern: str = "") -> bool:
    """Return whether a path inside a source leads to something beside the data.

    Such names begin with `.` or `_`, as in Spark, where `_name=value` is a partition with data, end
    as those of checksums and unfinished copies, or are those of the Hugging Face hub's cards.
    Python's sources may begin with `_`.

    Args:
        path: path below the source.
        pattern: the glob by which it was found; parts of it with such names ask for them.
    """
    name, wanted = path.rpartition("/")[2], pattern.rpartition("/")[2]
    # `*.md` asks for README.md, too.
    is_asked_for = name in _CARDS_OF_THE_HUB and Path(wanted).suffix == Path(name).suffix
    return _count_sidecars(path) - is_asked_for > _count_sidecars(pattern)


def _count_sidecars(path: str) -> int:
    is_python = path.endswith(_PYTHON)
    return sum(
        _is_hidden(part)
        or (part.startswith("_") and "=" not in part and not is_python)
        or part.endswith((".crc", "._COPYING_"))
        or part in _CARDS_OF_THE_HUB
        for part in path.split("/")
    )


def _is_hidden(name: str) -> bool:
    return name.startswith(".") and bool(name.strip("."))


def utf8_name(path: str) -> str:
    """Return the text that UTF-8 makes of a local path's bytes."""
    # Ids of samples and the order of files must not depend on the encoding of the machine's locale.
    return os.fsencode(path).decode(errors="surrogateescape")


def to_local_name(path: str) -> str:
    """Return the path in this machine's encoding of file names, if it cannot encode the text."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return os.fsdecode(path.encode(errors="surrogateescape"))
    return path


class _FirstBytes(FileIO):
    """The first bytes of a file, which ends there however much is appended meanwhile."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(descriptor)
        self._size = size

    @override
    def readinto(self, buffer: Any) -> int | None:
        place = self.tell()
        left = max(self._size - place, 0)
        read = super().readinto(memoryview(buffer)[:left])
        if left and len(buffer) and not read:
            raise OSError(f"it shrank from {self._size:,} bytes to {place:,} while it was read")
        return read

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            return super().seek(self._size + offset)
        return super().seek(offset, whence)

    # FileIO's own methods do not call `readinto`.
    @override
    def read(self, size: int | None = -1) -> bytes:
        return RawIOBase.read(self, -1 if size is None else size) or b""

    @override
    def readall(self) -> bytes:
        return RawIOBase.readall(self) or b""


def open_regular(path: str, size: int | None = None) -> BinaryIO:
    """Open a regular file, or its first `size` bytes, for reading.

    Raises:
        OSError: the file cannot be opened, or is not a regular file. Later: it shrank.
    """
    # A pipe could have taken the file's place; without O_NONBLOCK, opening it would wait for a
    # writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    stream = BufferedReader(FileIO(descriptor) if size is None else _FirstBytes(descriptor, size))
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode):
        stream.close()
        raise OSError(f"{_kind(status)}, expected a file")
    return stream


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "no file")


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _match_glob(pattern: str) -> LocalFiles:
    """Return the files that a glob matches, without folders."""
    first = min(pattern.find(letter) for letter in "*?[" if letter in pattern)
    found = LocalFiles(_folder(pattern[:first]))
    for path in sorted(fsspec.filesystem("file").glob(pattern), key=utf8_name):
        if is_sidecar(path[len(found.base) + 1 :], pattern[len(found.base) + 1 :]):
            found.sidecars.append(path)
            continue
        try:
            _add_file(found, path, Path(path).stat())
        except OSError as error:
            _add_error(found, path, error)
    return found


def _add_file(found: LocalFiles, path: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        found.sizes[path] = status.st_size
    elif not stat.S_ISDIR(status.st_mode):
        found.others.append(f"{escape_unprintable(path)}: {_kind(status)}, expected a file")


def _add_error(found: LocalFiles, path: str, error: OSError) -> None:
    broken = isinstance(error, FileNotFoundError) and os.path.lexists(path)
    why = "a link to something that is not there" if broken else describe_error(error)
    found.others.append(f"{escape_unprintable(path)}: {why}")


class _Walk:
    """Collects the files below a folder that are no sidecars, and visits each folder once.

    Links to folders are followed last, in the order of their names, unless they lead to a folder
    that was already visited or is a parent.
    """

    def __init__(self, root: str) -> None:
        self._found = LocalFiles(root.rstrip("/"))
        self._folders = [self._found.base or "/"]
        # A heap: links are followed in the order of their names.
        self._links: list[str] = []
        above = Path(os.path.realpath(root)).parents
        # A link to a parent would add the folder's own files again.
        self._seen = {_identity(folder.stat()) for folder in above}

    def files(self) -> LocalFiles:
        for folder in self._unvisited_folders():
            try:
                entries = list(os.scandir(folder))
            except OSError as error:
                _add_error(self._found, folder, error)
                continue
            for entry in entries:
                if _is_hidden(entry.name):
                    self._found.sidecars.append(entry.path)
                else:
                    self._visit(entry)
        self._found.sizes = dict(
            sorted(self._found.sizes.items(), key=lambda item: utf8_name(item[0]))
        )
        self._found.others.sort()
        return self._found

    def _unvisited_folders(self) -> Iterator[str]:
        while self._folders or self._links:
            folder = self._folders.pop() if self._folders else heapq.heappop(self._links)
            identity = _identity(Path(folder).stat())
            if identity not in self._seen:
                self._seen.add(identity)
                yield folder

    def _visit(self, entry: os.DirEntry[str]) -> None:
        inside = entry.path[len(self._found.base) + 1 :]
        try:
            status = entry.stat()
        except OSError as error:
            if is_sidecar(inside):
                self._found.sidecars.append(entry.path)
            else:
                _add_error(self._found, entry.path, error)
            return
        if not stat.S_ISDIR(status.st_mode) and is_sidecar(inside):
            self._found.sidecars.append(entry.path)
        elif not stat.S_ISDIR(status.st_mode):
            _add_file(self._found, entry.path, status)
        elif entry.is_symlink():
            heapq.heappush(self._links, entry.path)
        else:
            self._folders.append(entry.path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
