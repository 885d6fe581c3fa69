"""Source files: which files the configured paths mean, in an order that no machine changes."""

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

from elastrata_pipelines.checked_json import reason
from elastrata_pipelines.errors import in_one_line
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.local_files import (
    find_local,
    named_here,
    open_regular,
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
"""What stores call that which changes when a file does."""
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source."""

    source: int
    """Number of the source in the configuration."""
    url: str
    """Where it lies; a plain absolute path where it is local."""
    name: str
    """Its path inside the source, unique there: part of every sample's identity."""
    bytes: int
    """Size as stored, maybe compressed."""
    kind: Kind
    compression: str | None
    stamp: str
    """Changes when the file does: a checksum (local) or the store's own tag."""

    @property
    def shown(self) -> str:
        """Where it lies, as a line can hold it."""
        return in_one_line(self.url)


@dataclass(frozen=True)
class Found:
    """The files that the paths of a source mean."""

    files: list[SourceFile]
    """In order."""
    problems: list[str]
    """One line for each path that gives no file."""
    others: list[str]
    """One line for each thing in a folder, or matched by a glob, that is no file to read."""


def find_files(number: int, config: SourceConfig) -> Found:
    """The files of a source. Empty ones are left out, as long as others remain."""
    entries: dict[str, _Entry] = {}
    problems: list[str] = []
    empty: list[str] = []
    others: dict[str, None] = {}
    for path in config.paths:
        try:
            found, beside = _expand(path)
        except Exception as error:  # every store has exceptions of its own
            problems.append(f"{in_one_line(path)}: cannot be read ({in_one_line(reason(error))})")
            continue
        others |= dict.fromkeys(beside)
        filled = [entry for entry in found if entry.bytes]
        if not found:
            problems.append(f"{in_one_line(path)}: no such file or folder, or nothing in it")
        elif not filled and found[0].is_itself:
            empty.append(f"{in_one_line(found[0].url)}: the file is empty")
        elif not filled:
            problems.append(f"{in_one_line(path)}: all {len(found)} files in it are empty")
        for entry in filled:
            entries.setdefault(entry.url, entry)
    if not entries:
        problems += empty
    return Found(_finish(number, config, list(entries.values())), problems, list(others))


@dataclass(frozen=True)
class _Entry:
    url: str
    name: str
    bytes: int
    stamp: str
    is_itself: bool
    """Whether the path named this very file."""


def _expand(path: str) -> tuple[list[_Entry], list[str]]:
    """The files a path means, by their names inside it, and what else is there."""
    if not is_local(path):
        return list(_expand_url(path)), []
    plain = named_here(path.removeprefix("file://").removeprefix("local://"))
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
    """Return what a file of that name holds, and how it is compressed."""
    stem, ending = splitext(name.lower())
    compression = COMPRESSIONS.get(ending)
    ending = splitext(stem)[1] if compression else ending
    kind = _KINDS.get(ending, "text") if config.format == "auto" else config.format
    return kind, compression


def is_hidden(name: str) -> bool:
    """Whether a part of a path is hidden."""
    return any(part.startswith(".") and part.strip(".") for part in name.split("/"))


def _checksum(path: str, size: int) -> str:
    digest = hashlib.blake2b(digest_size=8)
    asked = min(size + 1, _CHUNK_BYTES)  # of megabytes more, to be freed, small files take longer
    try:
        with open_regular(path) as stream:
            while chunk := stream.read(asked):
                digest.update(chunk)
    except OSError:  # reading it reports the problem, with its line
        return ""
    return digest.hexdigest()


def _finish(number: int, config: SourceConfig, found: Sequence[_Entry]) -> list[SourceFile]:
    seen: Counter[str] = Counter()
    files = []
    for entry in found:
        kind, compression = kind_of(entry.name, config)
        file = SourceFile(source=number, url=entry.url, name=entry.name, bytes=entry.bytes,
                          kind=kind, compression=compression, stamp=entry.stamp)  # fmt: skip
        seen[file.name] += 1
        files.append(
            file if seen[file.name] == 1 else replace(file, name=f"{file.name}#{seen[file.name]}")
        )
    return files
