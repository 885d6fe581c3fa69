"""Source files: resolves configured paths to files, in an order that does not depend on the
machine."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from posixpath import splitext
from typing import Any, Literal

from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import escape_unprintable, pluralize
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.local_files import (
    find_local,
    is_sidecar,
    open_regular,
    to_local_name,
    utf8_name,
)
from elastrata_pipelines.storage import is_absent, is_local
from elastrata_pipelines.waits import open_file_system

Kind = Literal["text", "jsonl", "parquet"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
COMPRESSIONS = {
    ".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd",
    ".tgz": "gzip", ".tbz": "bz2", ".tbz2": "bz2", ".txz": "xz", ".tzst": "zstd",
}  # fmt: skip
_TAGS = ("ETag", "etag", "blob_id", "mtime")
"""Names that stores use for values which change when a file does."""
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source."""

    source: int
    """Number of the source in the configuration."""
    url: str
    """URL of the file; a plain absolute path if it is local."""
    name: str
    """Path inside the source, which is unique there and part of every sample's identity."""
    bytes: int
    """Stored size, which may be compressed."""
    kind: Kind
    compression: str | None
    stamp: str
    """Value that changes when the file does: a checksum if it is local, else the store's tag."""
    modified: int = 0
    """Time of a local file's last change before it was read, in nanoseconds; 0 if unknown."""

    @property
    def shown(self) -> str:
        """URL of the file in printable form."""
        return escape_unprintable(self.url)


@dataclass(frozen=True)
class FoundFiles:
    """Files to which the paths of a source resolve."""

    files: list[SourceFile]
    """Files in order."""
    problems: list[str]
    """One line for each path without files."""
    others: list[str]
    """One line for each entry of a folder, or match of a glob, that cannot be read as a file."""
    sidecars: int
    """Number of files and folders beside the data that were passed over."""


def find_files(number: int, config: SourceConfig) -> FoundFiles:
    """Return the files of a source. Empty files are left out if other files remain."""
    entries: dict[str, _Entry] = {}
    problems: list[str] = []
    empty: list[str] = []
    others: dict[str, None] = {}
    sidecars: dict[str, None] = {}
    for path in config.paths:
        try:
            found, other_entries, beside = _expand(path)
        # Every store raises errors of other classes.
        except Exception as error:
            problems.append(
                f"{escape_unprintable(path)}: cannot be read "
                f"({escape_unprintable(describe_error(error))})"
            )
            continue
        others |= dict.fromkeys(other_entries)
        sidecars |= dict.fromkeys(beside)
        filled = [entry for entry in found if entry.bytes]
        if not found and beside:
            files, name = pluralize(len(beside), "file"), beside[0].rpartition("/")[2]
            problems.append(
                f"{escape_unprintable(path)}: nothing in it but {files} beside the data, such as "
                f"{escape_unprintable(name)}; a path that names one reads it"
            )
        elif not found:
            problems.append(f"{escape_unprintable(path)}: no such file or folder, or nothing in it")
        elif not filled and found[0].is_itself:
            empty.append(f"{escape_unprintable(found[0].url)}: the file is empty")
        elif not filled:
            problems.append(
                f"{escape_unprintable(path)}: {pluralize(len(found), 'file')} in it, all empty"
            )
        for entry in filled:
            # Paths may overlap; each file counts once.
            entries.setdefault(entry.url, entry)
    if not entries:
        problems += empty
    return FoundFiles(
        _make_source_files(number, config, list(entries.values())),
        problems,
        list(others),
        # Another path may name one of them.
        len(sidecars.keys() - entries.keys()),
    )


@dataclass(frozen=True)
class _Entry:
    url: str
    name: str
    bytes: int
    stamp: str
    is_itself: bool
    """Whether the configured path named exactly this file."""
    modified: int = 0


def _expand(path: str) -> tuple[list[_Entry], list[str], list[str]]:
    """Return the files that a path denotes, by their names inside it, lines for other entries, and
    the paths of sidecars."""
    if not is_local(path):
        sidecars: list[str] = []
        return list(_expand_url(path, sidecars)), [], sidecars
    plain = to_local_name(path.removeprefix("file://").removeprefix("local://"))
    root = str(Path(plain).expanduser().absolute())
    found = find_local(root)
    entries = [
        _Entry(url, utf8_name(url[len(found.base) + 1 :]), size, stamp, url == root, modified)
        for url, size in found.sizes.items()
        for stamp, modified in [_checksum(url, size)]
    ]
    return entries, found.others, found.sidecars


def _expand_url(url: str, sidecars: list[str]) -> Iterator[_Entry]:
    """Yield the files of a URL, and add the others beside the data to `sidecars`."""
    fs, root = open_file_system(url)
    if fs.isdir(root):
        base, pattern = root.rstrip("/"), ""
        found = fs.find(base, detail=True)
    elif (info := _find_info(fs, root)) is not None:
        base, _, pattern = root.rpartition("/")
        found = {root: info}
    elif has_magic(root):
        base = root[: min(root.find(c) for c in "*?[" if c in root)].rpartition("/")[0]
        pattern = root[len(base) + 1 :]
        found = {name: info for name, info in fs.glob(root, detail=True).items()
                 if info["type"] == "file"}  # fmt: skip
    else:
        return
    for name, info in sorted(found.items()):
        full = str(fs.unstrip_protocol(name))
        if is_sidecar(name[len(base) + 1 :], pattern):
            sidecars.append(full)
            continue
        tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
        size = info["size"]
        # A server that sends an answer in chunks says neither its size nor, often, a tag.
        if size is None:
            with fs.open(name, "rb") as stream:
                size, tag = _digest(stream, _CHUNK_BYTES)
        yield _Entry(full, name[len(base) + 1 :], int(size), tag, is_itself=full == url)


def kind_of(name: str, config: SourceConfig) -> tuple[Kind, str | None]:
    """Return the content type and the compression of a file, judged by its name."""
    stem, ending = splitext(name.lower())
    compression = COMPRESSIONS.get(ending)
    ending = splitext(stem)[1] if compression else ending
    kind = _KINDS.get(ending, "text") if config.format == "auto" else config.format
    return kind, compression


def find_changes(files: Iterable[SourceFile]) -> tuple[list[str], list[str]]:
    """Return one line for each local file that was altered since it was found, and one for each
    to which something was appended, which was not read."""
    altered, longer = [], []
    for file in files:
        try:
            status = Path(file.url).stat() if file.modified else None
        # What was read of a file that is gone is still right.
        except OSError:
            continue
        if status is None or (status.st_mtime_ns, status.st_size) == (file.modified, file.bytes):
            continue
        if status.st_size < file.bytes or _checksum(file.url, file.bytes)[0] != file.stamp:
            altered.append(f"{file.shown}: was changed while it was read; prepare it again")
        elif status.st_size > file.bytes:
            longer.append(
                f"{file.shown}: grew to {status.st_size:,} bytes; its first {file.bytes:,} were "
                "read"
            )
    return altered, longer


def _find_info(fs: Any, path: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = fs.info(path)
    except Exception as error:
        if is_absent(error):
            return None
        raise OSError(str(error.__cause__ or error)) from None
    return found


def _checksum(path: str, size: int) -> tuple[str, int]:
    """Return the checksum of a local file's first bytes, and the time of its last change in
    nanoseconds; nothing if it cannot be read."""
    # Small files get small buffers: allocating and freeing megabytes would take longer than
    # reading.
    try:
        with open_regular(path, size) as stream:
            modified = os.fstat(stream.fileno()).st_mtime_ns
            return _digest(stream, min(size + 1, _CHUNK_BYTES))[1], modified
    # Reading the file later reports the error with its position.
    except OSError:
        return "", 0


def _digest(stream: Any, chunk_bytes: int) -> tuple[int, str]:
    """Return the size of a stream and its checksum."""
    digest, size = hashlib.blake2b(digest_size=8), 0
    while chunk := stream.read(chunk_bytes):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def _make_source_files(
    number: int, config: SourceConfig, found: Sequence[_Entry]
) -> list[SourceFile]:
    seen: Counter[str] = Counter()
    files = []
    for entry in found:
        kind, compression = kind_of(entry.name, config)
        file = SourceFile(source=number, url=entry.url, name=entry.name, bytes=entry.bytes,
                          kind=kind, compression=compression, stamp=entry.stamp,
                          modified=entry.modified)  # fmt: skip
        seen[file.name] += 1
        files.append(
            # The number makes equal names from different paths unique.
            file if seen[file.name] == 1 else replace(file, name=f"{file.name}#{seen[file.name]}")
        )
    return files
