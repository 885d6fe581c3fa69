"""Source files: resolves configured paths to files, in an order that does not depend on the
machine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from posixpath import splitext
from typing import Literal

from fsspec.core import url_to_fs

from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import escape_unprintable, pluralize
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.local_files import (
    find_local,
    open_regular,
    to_local_name,
    utf8_name,
)
from elastrata_pipelines.storage import is_local

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


def find_files(number: int, config: SourceConfig) -> FoundFiles:
    """Return the files of a source. Empty files are left out if other files remain."""
    entries: dict[str, _Entry] = {}
    problems: list[str] = []
    empty: list[str] = []
    others: dict[str, None] = {}
    for path in config.paths:
        try:
            found, other_entries = _expand(path)
        # Every store raises errors of other classes.
        except Exception as error:
            problems.append(
                f"{escape_unprintable(path)}: cannot be read "
                f"({escape_unprintable(describe_error(error))})"
            )
            continue
        others |= dict.fromkeys(other_entries)
        filled = [entry for entry in found if entry.bytes]
        if not found:
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
        _make_source_files(number, config, list(entries.values())), problems, list(others)
    )


@dataclass(frozen=True)
class _Entry:
    url: str
    name: str
    bytes: int
    stamp: str
    is_itself: bool
    """Whether the configured path named exactly this file."""


def _expand(path: str) -> tuple[list[_Entry], list[str]]:
    """Return the files that a path denotes, by their names inside it, and lines for other
    entries."""
    if not is_local(path):
        return list(_expand_url(path)), []
    plain = to_local_name(path.removeprefix("file://").removeprefix("local://"))
    root = str(Path(plain).expanduser().absolute())
    found = find_local(root)
    entries = [
        _Entry(url, utf8_name(url[len(found.base) + 1 :]), size, _checksum(url, size), url == root)
        for url, size in found.sizes.items()
    ]
    return entries, found.others


def _expand_url(url: str) -> Iterator[_Entry]:
    fs, root = url_to_fs(url)
    if fs.isdir(root):
        base = root.rstrip("/")
        found = {name: info for name, info in fs.find(base, detail=True).items()
                 if not is_hidden(name[len(base) + 1 :])}  # fmt: skip
    elif fs.exists(root):
        base, found = root.rpartition("/")[0], {root: fs.info(root)}
    elif has_magic(root):
        base = root[: min(root.find(c) for c in "*?[" if c in root)].rpartition("/")[0]
        found = {name: info for name, info in fs.glob(root, detail=True).items()
                 if info["type"] == "file"}  # fmt: skip
    else:
        return
    for name, info in sorted(found.items()):
        tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
        size = int(info["size"] or 0)
        full = str(fs.unstrip_protocol(name))
        yield _Entry(full, name[len(base) + 1 :], size, tag, is_itself=full == url)


def kind_of(name: str, config: SourceConfig) -> tuple[Kind, str | None]:
    """Return the content type and the compression of a file, judged by its name."""
    stem, ending = splitext(name.lower())
    compression = COMPRESSIONS.get(ending)
    ending = splitext(stem)[1] if compression else ending
    kind = _KINDS.get(ending, "text") if config.format == "auto" else config.format
    return kind, compression


def is_hidden(name: str) -> bool:
    """Return whether a part of a path is hidden."""
    return any(part.startswith(".") and part.strip(".") for part in name.split("/"))


def _checksum(path: str, size: int) -> str:
    digest = hashlib.blake2b(digest_size=8)
    # Small files get small buffers: allocating and freeing megabytes would take longer than
    # reading.
    chunk_bytes = min(size + 1, _CHUNK_BYTES)
    try:
        with open_regular(path) as stream:
            while chunk := stream.read(chunk_bytes):
                digest.update(chunk)
    # Reading the file later reports the error with its position.
    except OSError:
        return ""
    return digest.hexdigest()


def _make_source_files(
    number: int, config: SourceConfig, found: Sequence[_Entry]
) -> list[SourceFile]:
    seen: Counter[str] = Counter()
    files = []
    for entry in found:
        kind, compression = kind_of(entry.name, config)
        file = SourceFile(source=number, url=entry.url, name=entry.name, bytes=entry.bytes,
                          kind=kind, compression=compression, stamp=entry.stamp)  # fmt: skip
        seen[file.name] += 1
        files.append(
            # The number makes equal names from different paths unique.
            file if seen[file.name] == 1 else replace(file, name=f"{file.name}#{seen[file.name]}")
        )
    return files
