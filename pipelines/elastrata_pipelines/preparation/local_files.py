"""Local files: the regular files that a path of this machine means, and what is none of them."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import has_magic
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO

import fsspec

from elastrata_pipelines.checked_json import reason
from elastrata_pipelines.errors import in_one_line

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass
class LocalFiles:
    """The files that a path means."""

    base: str
    """The names of files, by which samples are identified, are their paths below it."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each regular file, by its path, in the order of the paths."""
    others: list[str] = field(default_factory=list)
    """One line for each thing in a folder, or matched by a glob, that cannot be read as a file."""


def find_local(path: str) -> LocalFiles:
    """The files that an absolute path means: itself, those below it, or those it matches.

    Raises:
        OSError: it is no file, folder or glob, or cannot be looked at.
    """
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        if os.path.lexists(path):
            raise OSError("a link to something that is not there") from None
        return _matching(path) if has_magic(path) else LocalFiles(path)
    if stat.S_ISDIR(status.st_mode):
        return _Walk(path).files()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{_kind(status)}, expected a file or folder")
    return LocalFiles(_folder(path), {path: status.st_size})


def utf8_name(path: str) -> str:
    """Return the path that UTF-8 makes of a local path's bytes, in whichever encoding Python reads
    names here: ids of samples and the order of files must not depend on the machine's locale."""
    return os.fsencode(path).decode(errors="surrogateescape")


def named_here(path: str) -> str:
    """Return the path as this machine's encoding of names has it, if it has no letters for it."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return os.fsdecode(path.encode(errors="surrogateescape"))
    return path


def open_regular(path: str) -> BinaryIO:
    """Opens a file for reading, and nothing else: a pipe can wait, and a device go on, for ever.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # O_NONBLOCK: to open a pipe, should one have taken the file's place, waits for its writer.
    stream = BufferedReader(FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)))
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode):
        stream.close()
        raise OSError(f"{_kind(status)}, expected a file")
    return stream


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "no file")


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _matching(pattern: str) -> LocalFiles:
    """The files that a glob matches; folders that it matches are left out."""
    first = min(pattern.find(letter) for letter in "*?[" if letter in pattern)
    found = LocalFiles(_folder(pattern[:first]))
    for path in sorted(fsspec.filesystem("file").glob(pattern), key=utf8_name):
        try:
            _take(found, path, Path(path).stat())
        except OSError as error:
            _note(found, path, error)
    return found


def _take(found: LocalFiles, path: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        found.sizes[path] = status.st_size
    elif not stat.S_ISDIR(status.st_mode):
        found.others.append(f"{in_one_line(path)}: {_kind(status)}, expected a file")


def _note(found: LocalFiles, path: str, error: OSError) -> None:
    broken = isinstance(error, FileNotFoundError) and os.path.lexists(path)
    why = "a link to something that is not there" if broken else reason(error)
    found.others.append(f"{in_one_line(path)}: {why}")


class _Walk:
    """The files below a folder that are not hidden, each folder's once.

    Links to folders are followed after all that lies below the folder itself, in the order of
    their names, unless they lead to a folder that was read already or that lies above.
    """

    def __init__(self, root: str) -> None:
        self._found = LocalFiles(root.rstrip("/"))
        self._folders = [self._found.base or "/"]
        self._links: list[str] = []
        above = Path(os.path.realpath(root)).parents
        self._seen = {_identity(folder.stat()) for folder in above}

    def files(self) -> LocalFiles:
        for folder in self._unseen():
            try:
                entries = list(os.scandir(folder))
            except OSError as error:
                _note(self._found, folder, error)
                continue
            for entry in entries:
                if not entry.name.startswith("."):
                    self._visit(entry)
        self._found.sizes = dict(
            sorted(self._found.sizes.items(), key=lambda item: utf8_name(item[0]))
        )
        self._found.others.sort()
        return self._found

    def _unseen(self) -> Iterator[str]:
        while self._folders or self._links:
            folder = self._folders.pop() if self._folders else heapq.heappop(self._links)
            identity = _identity(Path(folder).stat())
            if identity not in self._seen:
                self._seen.add(identity)
                yield folder

    def _visit(self, entry: os.DirEntry[str]) -> None:
        try:
            status = entry.stat()
        except OSError as error:
            _note(self._found, entry.path, error)
            return
        if not stat.S_ISDIR(status.st_mode):
            _take(self._found, entry.path, status)
        elif entry.is_symlink():
            heapq.heappush(self._links, entry.path)
        else:
            self._folders.append(entry.path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
