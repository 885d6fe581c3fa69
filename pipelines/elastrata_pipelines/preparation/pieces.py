"""Pieces: byte ranges of a file that contain whole documents.

Reading only finds places at which a file can be divided; the process that receives a piece parses
it.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import SEEK_END, BufferedReader, RawIOBase
from pickle import PickleBuffer
from shutil import copyfileobj
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from backports import zstd
from fsspec.core import split_protocol

from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.local_files import open_regular
from elastrata_pipelines.preparation.sources import SourceFile
from elastrata_pipelines.storage import is_local
from elastrata_pipelines.waits import open_file_system

_BLOCKS_PER_PORTION = 8
_PACKED_BYTES = 2**16
# Small files are read with small buffers: allocations of hundreds of kilobytes are requested from
# the system, which takes time.
_SPARE_BYTES = 2**12
_FREE_EXPANSION_BYTES, _MAX_EXPANSION = 2**26, 200
_LARGE_BYTES = 2**20
_LARGEST_WINDOW = 31
"""Binary logarithm of the largest zstd window, that of `zstd --long=31`."""
_USUAL_WINDOW = 2**27
"""Bytes of the largest zstd window that tools read without an option."""
_MOST_HEADER_BYTES = 36
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Whole documents of one file, as bytes."""

    file: SourceFile
    first: int
    """Line or Parquet row at which the piece begins, counted from 0."""
    offset: int
    """Byte at which the piece begins in the uncompressed file."""
    data: bytes | memoryview
    """Content; large content is passed between processes without a copy."""
    ends: tuple[int, ...] | None = None
    """Parquet: end of each row's text in `data`."""
    missing: tuple[int, ...] = ()
    """Parquet: rows without text, counted from `first`."""

    def __getstate__(self) -> dict[str, Any]:
        large = len(self.data) >= _LARGE_BYTES
        # A PickleBuffer can be passed out of band, which spares a copy.
        return self.__dict__ | ({"data": PickleBuffer(self.data)} if large else {})


class DocumentTooLongError(Exception):
    """A document exceeds the limit; the message is the line about the problem."""


def describe_too_long(file: SourceFile, line: int, max_document_bytes: int) -> str:
    """Return the message for an overlong document that begins in `line` (from 0)."""
    place = f"row {line}" if file.kind == "parquet" else f"line {line + 1}"
    return (
        f"{file.shown}: the document that begins at {place} is longer than max_document_bytes "
        f"({max_document_bytes}); cut it (documents: line or paragraph, or document_start) "
        "or raise the limit"
    )


@contextmanager
def open_uncompressed(stored: Any, compression: str | None) -> Iterator[BinaryIO]:
    """Yield a stream of the uncompressed content of `stored`."""
    if compression == "gzip":
        with gzip.open(stored, "rb") as stream:
            yield cast(BinaryIO, stream)
    elif compression in _DECOMPRESSORS:
        yield cast(
            BinaryIO, BufferedReader(_ConcatenatedStreams(stored, _DECOMPRESSORS[compression]))
        )
    else:
        yield stored


class _ConcatenatedStreams(RawIOBase):
    """Reader of concatenated compressed streams."""

    # Needed because `bz2.open` and `lzma.open` take foreign bytes, as in a damaged second stream,
    # for the end of the file, and silently drop what follows.
    def __init__(self, stored: Any, new: Callable[[], Any]) -> None:
        self._stored, self._new, self._stream = stored, new, new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._stream.eof:
                # xz files may be padded with zeros.
                packed = self._stream.unused_data.lstrip(b"\0")
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
    # In the older .lzma format, zeros would be an empty stream.
    "xz": partial(lzma.LZMADecompressor, format=lzma.FORMAT_XZ),
    "zstd": partial(
        zstd.ZstdDecompressor, options={zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW}
    ),
}


def describe_windows(files: Sequence[SourceFile]) -> Iterator[str]:
    """Yield a line if the largest zstd file of a source takes unusually much memory to read."""
    largest: dict[int, SourceFile] = {}
    for file in sorted(files, key=lambda file: file.bytes):
        if file.compression == "zstd":
            largest[file.source] = file
    for file in largest.values():
        try:
            with open_stored(file) as stored:
                window = _window_bytes(stored.read(_MOST_HEADER_BYTES))
        # Every store raises errors of other classes; reading the file later reports this one.
        except Exception:
            continue
        if window > _USUAL_WINDOW:
            yield (
                f"{file.shown}: each process takes {window / 2**20:,.0f} MiB for the window of its "
                "zstd data"
            )


def _window_bytes(head: bytes) -> int:
    """Return the bytes of memory for the window of a zstd frame (RFC 8878, section 3.1.1.1)."""
    # Frames of any other content may come first.
    while head[1:4] == b"\x2a\x4d\x18":
        head = head[8 + int.from_bytes(head[4:8], "little") :]
    if len(head) < _MOST_HEADER_BYTES // 2 or not head.startswith(b"\x28\xb5\x2f\xfd"):
        return 0
    is_single_segment = head[4] & 0x20
    if is_single_segment:
        # The window is the whole content.
        return int(zstd.get_frame_info(head).decompressed_size or 0)
    exponent, mantissa = divmod(head[5], 8)
    return (1 << (10 + exponent)) * (8 + mantissa) // 8


def open_stored(file: SourceFile) -> Any:
    """Open a file of a source for reading, without decompression."""
    url = file.url
    if is_local(url):
        return open_regular(url, file.bytes)
    protocol, _ = split_protocol(url)
    # A chain of URLs, as it was configured.
    if "::" in protocol:
        fs, path = open_file_system(url)
    else:
        # A file name in the store may contain `::`, too.
        fs, _ = open_file_system(url.partition("::")[0])
        path = fs._strip_protocol(url)
    stream = fs.open(path, "rb")
    try:
        stream.seek(0, SEEK_END)
        stream.seek(0)
    # A server that has no ranges, or does not say the size, sends a file once.
    except ValueError:
        with stream:
            copy = TemporaryFile()  # noqa: SIM115 - the caller closes it
            copyfileobj(stream, copy)
        copy.seek(0)
        return copy
    return stream


def text_pieces(
    file: SourceFile, stream: Any, config: SourceConfig, size: int, max_document_bytes: int
) -> Iterator[Piece]:
    """Yield the pieces of a text or JSON Lines file, each of about `size` bytes.

    Args:
        file: the file.
        stream: stream of its uncompressed bytes, from the first byte on.
        config: configuration of the source.
        size: approximate size of a piece.
        max_document_bytes: maximum size of a document.

    Raises:
        DocumentTooLongError: a document is longer than `max_document_bytes`.
        Exception: any error of the store or compression if the file cannot be read.
    """
    find_cut = _make_cut_finder(file, config)
    line = offset = 0
    buffer = b""
    while True:
        block = stream.read(_bytes_to_read(file, offset, len(buffer), size // _BLOCKS_PER_PORTION))
        buffer += block
        end = find_cut(buffer) if block else len(buffer)
        if end:
            yield Piece(file=file, first=line, offset=offset, data=buffer[:end])
            line += buffer.count(b"\n", 0, end)
            offset += end
            buffer = buffer[end:]
        if not block:
            return
        refuse_bomb(file, offset + len(buffer))
        if len(buffer) > max_document_bytes:
            raise DocumentTooLongError(describe_too_long(file, line, max_document_bytes))


def _bytes_to_read(file: SourceFile, offset: int, buffered: int, least: int) -> int:
    """Return the number of bytes to read next: at least as many as are buffered."""
    # Doubling the buffer keeps the time linear for a document of any length.
    num_bytes = max(least, buffered)
    if file.compression:
        return num_bytes
    return min(num_bytes, max(file.bytes - offset - buffered, 0) + _SPARE_BYTES)


def refuse_bomb(file: SourceFile, unpacked: int) -> None:
    """Check how many bytes a compressed file has produced.

    Raises:
        OSError: the file is compressed and expands too much.
    """
    most = _FREE_EXPANSION_BYTES + _MAX_EXPANSION * file.bytes
    if file.compression and unpacked > most:
        raise OSError(
            f"it unpacks to more than {most:,} bytes, {_MAX_EXPANSION} times its size and more; "
            "unpack it if that is meant"
        )


def _make_cut_finder(file: SourceFile, config: SourceConfig) -> Any:
    """Return a function that finds the last document end in a buffer, or 0."""
    if file.kind == "jsonl":
        return lambda buffer: buffer.rfind(b"\n") + 1
    if config.document_start is not None:
        starts = re.compile(config.document_start)
        return lambda buffer: _find_last_start(buffer, starts)
    return {
        "file": lambda buffer: 0,
        "line": lambda buffer: buffer.rfind(b"\n") + 1,
        "paragraph": _find_last_blank_line,
    }[config.documents]


def _find_last_start(buffer: bytes, starts: re.Pattern[str]) -> int:
    # The last line may be incomplete.
    end = buffer.rfind(b"\n")
    while end > 0:
        begin = buffer.rfind(b"\n", 0, end) + 1
        if begin and starts.match(buffer[begin:end].decode(errors="replace")):
            return begin
        end = begin - 1
    return 0


def _find_last_blank_line(buffer: bytes) -> int:
    """Return the end of the last blank line that is followed by more text, or 0."""
    tail = 2**16
    while True:
        matches = list(_BLANK_LINE.finditer(buffer, max(0, len(buffer) - tail)))
        if matches:
            return matches[-1].end()
        if tail >= len(buffer):
            return 0
        tail *= 16
