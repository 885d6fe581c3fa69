"""Pieces: whole documents of one file, as they lie there.

Reading only finds a place to cut; what is inside is looked at by whoever gets the piece.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, RawIOBase
from pickle import PickleBuffer
from typing import Any, BinaryIO, cast

import pyarrow as pa
from fsspec.core import split_protocol, url_to_fs

from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.local_files import open_regular
from elastrata_pipelines.preparation.sources import SourceFile
from elastrata_pipelines.storage import is_local

_BLOCKS_PER_PORTION = 8
_PACKED_BYTES = 2**16
_SPARE_BYTES = 2**12  # memory by the hundred thousand is asked of the system, and takes time
_FREE_EXPANSION_BYTES, _MAX_EXPANSION = 2**26, 200
_LARGE_BYTES = 2**20
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Whole documents of one file, as bytes."""

    file: SourceFile
    first: int
    """Line (from 0), or Parquet row, at which it begins."""
    offset: int
    """Byte at which it begins in the uncompressed file."""
    data: bytes | memoryview
    """As it passes from process to process; a large one is not copied on the way."""
    ends: tuple[int, ...] | None = None
    """Parquet: where each row's text ends in `data`."""
    missing: tuple[int, ...] = ()
    """Parquet: rows, counted from `first`, that have no text."""

    def __getstate__(self) -> dict[str, Any]:
        large = len(self.data) >= _LARGE_BYTES
        return self.__dict__ | ({"data": PickleBuffer(self.data)} if large else {})


class DocumentTooLongError(Exception):
    """A document over the limit; the message is the problem's line."""


def too_long(file: SourceFile, line: int, max_document_bytes: int) -> str:
    """The problem of a document over the limit that begins in `line` (from 0)."""
    place = f"row {line}" if file.kind == "parquet" else f"line {line + 1}"
    return (
        f"{file.shown}: the document that begins at {place} is longer than max_document_bytes "
        f"({max_document_bytes}); cut it (documents: line or paragraph, or document_start) "
        "or raise the limit"
    )


@contextmanager
def uncompressed(stored: Any, compression: str | None) -> Iterator[BinaryIO]:
    """Read what is compressed in a stream."""
    if compression == "gzip":
        with gzip.open(stored, "rb") as stream:
            yield cast(BinaryIO, stream)
    elif compression in _DECOMPRESSORS:
        yield cast(BinaryIO, BufferedReader(_Streams(stored, _DECOMPRESSORS[compression])))
    elif compression == "zstd":
        with pa.CompressedInputStream(pa.PythonFile(stored, "r"), "zstd") as stream:
            yield cast(BinaryIO, stream)
    else:
        yield stored


class _Streams(RawIOBase):
    """Compressed streams one after another, whole: `bz2.open` and `lzma.open` take the first bytes
    that are none of theirs, as in a damaged second stream, for the end."""

    def __init__(self, stored: Any, new: Callable[[], Any]) -> None:
        self._stored, self._new, self._stream = stored, new, new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0")  # xz may be padded with zeros
                while not packed:
                    if not (block := self._stored.read(_PACKED_BYTES)):
                        return 0
                    packed = block.lstrip(b"\0")
                self._stream = self._new()
            elif self._stream.needs_input and not (packed := self._stored.read(_PACKED_BYTES)):
                raise EOFError("it ends before its compressed data does")
            if data := self._stream.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


_DECOMPRESSORS: dict[str | None, Callable[[], Any]] = {
    "bz2": bz2.BZ2Decompressor,
    # zeros would be an empty stream of the older .lzma format
    "xz": partial(lzma.LZMADecompressor, format=lzma.FORMAT_XZ),
}


def open_stored(url: str) -> Any:
    """Open a file of a source for reading, as it is stored."""
    if is_local(url):
        return open_regular(url)
    protocol, _ = split_protocol(url)
    if "::" in protocol:  # a chain of URLs, as it was configured
        fs, path = url_to_fs(url)
    else:  # a name in the store may hold `::` as well
        fs, _ = url_to_fs(url.partition("::")[0])
        path = fs._strip_protocol(url)
    return fs.open(path, "rb")


def text_pieces(
    file: SourceFile, stream: Any, config: SourceConfig, size: int, max_document_bytes: int
) -> Iterator[Piece]:
    """The pieces of a text or JSON Lines file, each of about `size` bytes.

    Args:
        file: whose text it is.
        stream: of its uncompressed bytes, from the first on.
        config: of the source.
        size: of a piece, about.
        max_document_bytes: a longer document is refused.

    Raises:
        DocumentTooLongError: a document is longer than `max_document_bytes`.
        Exception: of a file that cannot be read, whatever its store or its compression raises.
    """
    cut = _cutter(file, config)
    line = offset = 0
    buffer = b""
    while True:
        block = stream.read(_asked(file, offset, len(buffer), size // _BLOCKS_PER_PORTION))
        buffer += block
        at = cut(buffer) if block else len(buffer)
        if at:
            yield Piece(file=file, first=line, offset=offset, data=buffer[:at])
            line += buffer.count(b"\n", 0, at)
            offset += at
            buffer = buffer[at:]
        if not block:
            return
        refuse_bomb(file, offset + len(buffer))
        if len(buffer) > max_document_bytes:
            raise DocumentTooLongError(too_long(file, line, max_document_bytes))


def _asked(file: SourceFile, offset: int, buffered: int, least: int) -> int:
    """Bytes to read next: as many again as are there without a place to cut them."""
    asked = max(least, buffered)
    if file.compression:
        return asked
    return min(asked, max(file.bytes - offset - buffered, 0) + _SPARE_BYTES)


def refuse_bomb(file: SourceFile, unpacked: int) -> None:
    """Check how many bytes a file has given.

    Raises:
        OSError: it is compressed, and they are many more than it has.
    """
    most = _FREE_EXPANSION_BYTES + _MAX_EXPANSION * file.bytes
    if file.compression and unpacked > most:
        raise OSError(
            f"it unpacks to more than {most:,} bytes, {_MAX_EXPANSION} times its size and more; "
            "unpack it if that is meant"
        )


def _cutter(file: SourceFile, config: SourceConfig) -> Any:
    """A function that finds the last place in a buffer where a document surely ends, else 0."""
    if file.kind == "jsonl":
        return lambda buffer: buffer.rfind(b"\n") + 1
    if config.document_start is not None:
        starts = re.compile(config.document_start)
        return lambda buffer: _last_start(buffer, starts)
    return {
        "file": lambda buffer: 0,
        "line": lambda buffer: buffer.rfind(b"\n") + 1,
        "paragraph": _last_blank_line,
    }[config.documents]


def _last_start(buffer: bytes, starts: re.Pattern[str]) -> int:
    end = buffer.rfind(b"\n")  # the last line may be half read
    while end > 0:
        begin = buffer.rfind(b"\n", 0, end) + 1
        if begin and starts.match(buffer[begin:end].decode(errors="replace")):
            return begin
        end = begin - 1
    return 0


def _last_blank_line(buffer: bytes) -> int:
    """The end of the last blank line after which more is known to follow."""
    tail = 2**16
    while True:
        matches = list(_BLANK_LINE.finditer(buffer, max(0, len(buffer) - tail)))
        if matches:
            return matches[-1].end()
        if tail >= len(buffer):
            return 0
        tail *= 16
