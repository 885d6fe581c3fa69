"""Source files: which files the configured paths mean, in an order that no machine changes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fsspec.core import split_protocol, url_to_fs

from elastrata_pipelines.preparation.config import SourceConfig

Kind = Literal["text", "jsonl", "parquet"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source."""

    source: int
    """Number of the source in the configuration."""
    url: str
    """Where it lies; a plain path where it is local. Problems name it."""
    name: str
    """Its path inside the source, unique there: part of every sample's identity."""
    bytes: int
    """Size as stored, maybe compressed."""
    kind: Kind
    compression: str | None
    stamp: str
    """Changes when the file does: a checksum of its ends (local) or the store's own tag."""


def find_files(number: int, config: SourceConfig) -> tuple[list[SourceFile], list[str]]:
    """The files of a source in order, and one line for each path that gives none.

    Empty files are left out, as long as others remain.
    """
    files: dict[str, _Found] = {}
    problems: list[str] = []
    empty: list[str] = []
    for path in config.paths:
        try:
            found = list(_expand(path))
        except Exception as error:  # every store has exceptions of its own
            problems.append(f"{path}: cannot be read ({_reason(error)})")
            continue
        if not found:
            problems.append(f"{path}: no such file or folder, or nothing in it")
        filled = [entry for entry in found if entry.bytes]
        files |= {entry.url: files.get(entry.url, entry) for entry in filled}
        if found and not filled:
            is_itself = found[0].url == _local(path)
            what = "the file is empty" if is_itself else f"all {len(found)} files in it are empty"
            (empty if is_itself else problems).append(f"{path}: {what}")
    if not files:
        problems += empty
    return _finish(number, config, list(files.values())), problems


@dataclass(frozen=True)
class _Found:
    url: str
    name: str
    bytes: int
    stamp: str


def _local(path: str) -> str:
    return path if split_protocol(path)[0] else str(Path(path).expanduser().absolute())


def _expand(path: str) -> Iterator[_Found]:
    """The files a path means, by their names inside it."""
    fs, root = url_to_fs(_local(path))
    if fs.isdir(root):
        base = root.rstrip("/")
        found = {name: info for name, info in fs.find(base, detail=True).items()
                 if not _hidden(name[len(base) + 1 :])}  # fmt: skip
    elif fs.exists(root):
        base, found = root.rpartition("/")[0], {root: fs.info(root)}
    elif has_magic(root):
        base = root[: min(root.find(c) for c in "*?[" if c in root)].rpartition("/")[0]
        found = {name: info for name, info in fs.glob(root, detail=True).items()
                 if info["type"] == "file"}  # fmt: skip
    else:
        return
    for name, info in sorted(found.items()):
        url = name if _is_local(fs) else str(fs.unstrip_protocol(name))
        yield _Found(url, name[len(base) + 1 :], int(info["size"] or 0), _stamp(fs, name, info))


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _stamp(fs: Any, name: str, info: dict[str, Any]) -> str:
    if not _is_local(fs):
        return str(info.get("ETag") or info.get("etag") or info.get("mtime") or "")
    digest = hashlib.blake2b(digest_size=8)
    try:
        with open(name, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError:  # reading it reports the problem, with its line
        return ""
    return digest.hexdigest()


def _finish(number: int, config: SourceConfig, found: Sequence[_Found]) -> list[SourceFile]:
    seen: Counter[str] = Counter()
    files = []
    for entry in found:
        endings = ["", "", *PurePosixPath(entry.name.lower()).suffixes]
        compression = COMPRESSIONS.get(endings[-1])
        ending = endings[-2] if compression else endings[-1]
        kind = _KINDS.get(ending, "text") if config.format == "auto" else config.format
        file = SourceFile(source=number, url=entry.url, name=entry.name, bytes=entry.bytes,
                          kind=kind, compression=compression, stamp=entry.stamp)  # fmt: skip
        seen[file.name] += 1
        files.append(
            file if seen[file.name] == 1 else replace(file, name=f"{file.name}#{seen[file.name]}")
        )
    return files


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
