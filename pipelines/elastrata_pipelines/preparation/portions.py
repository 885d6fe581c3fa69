"""Portions: consecutive documents of a few files, the unit of all work on a corpus.

A portion depends on the files alone, never on how many processes read them. Reading only finds a
place to cut; what is inside is looked at by whoever gets the portion.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.sources import SourceFile

_MIN_PORTION_BYTES, _MAX_PORTION_BYTES = 2 * 2**20, 64 * 2**20
_PORTIONS_AIMED_AT = 1024
_BLOCKS_PER_PORTION = 8
_PARQUET_ROWS = 256
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Whole documents of one file, as bytes."""

    file: SourceFile
    first: int
    """Line (from 0), or Parquet row, at which it begins."""
    offset: int
    """Byte at which it begins in the uncompressed file."""
    data: bytes
    ends: tuple[int, ...] | None = None
    """Parquet: where each row's text ends in `data`."""


@dataclass(frozen=True)
class Portion:
    """Some documents of one source, and what kept further ones from being read."""

    pieces: tuple[Piece, ...]
    problems: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the text."""
        return sum(len(piece.data) for piece in self.pieces)


def portion_bytes(total_bytes: int) -> int:
    """Text in a portion, in bytes: larger for a larger corpus, so that portions stay countable."""
    return min(max(total_bytes // _PORTIONS_AIMED_AT, _MIN_PORTION_BYTES), _MAX_PORTION_BYTES)


def group_files(files: Sequence[SourceFile], size: int) -> list[tuple[SourceFile, ...]]:
    """Consecutive files of one source, at least `size` bytes of them where there are as many."""
    groups: list[tuple[SourceFile, ...]] = []
    group: list[SourceFile] = []
    for file in files:
        if group and (file.source != group[0].source or sum(f.bytes for f in group) >= size):
            groups.append(tuple(group))
            group = []
        group.append(file)
    return [*groups, tuple(group)] if group else groups


def read_portions(
    files: Sequence[SourceFile], config: SourceConfig, *, size: int, max_document_bytes: int
) -> Iterator[Portion]:
    """Reads files of one source in portions of about `size` bytes.

    A file that cannot be read to its end becomes a problem of its portion; the next ones are read.
    """
    pieces: list[Piece] = []
    problems: list[str] = []
    for file in files:
        if file.kind == "parquet":
            found = _parquet_pieces(file, config, size)
        else:
            found = _text_pieces(file, config, size, max_document_bytes)
        try:
            for piece in found:
                pieces.append(piece)
                if sum(len(piece.data) for piece in pieces) >= size:
                    yield Portion(tuple(pieces), tuple(problems))
                    pieces, problems = [], []
        except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            problems.append(f"{file.url}: cannot be read ({' '.join(str(error).split())})")
        except _DocumentTooLongError as error:
            problems.append(str(error))
    if pieces or problems:
        yield Portion(tuple(pieces), tuple(problems))


class _DocumentTooLongError(Exception):
    pass


def too_long(file: SourceFile, line: int, max_document_bytes: int) -> str:
    """The problem of a document over the limit that begins in `line` (from 0)."""
    place = f"row {line}" if file.kind == "parquet" else f"line {line + 1}"
    return (
        f"{file.url}: the document that begins at {place} is longer than max_document_bytes "
        f"({max_document_bytes}); cut it (documents: line or paragraph, or document_start) "
        "or raise the limit"
    )


@contextmanager
def open_file(file: SourceFile) -> Iterator[BinaryIO]:
    """Opens a file for reading, uncompressed."""
    with fsspec.open(file.url, "rb") as stored:
        wrap: Any = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}.get(
            file.compression or ""
        )
        if wrap:
            with wrap(stored, "rb") as stream:
                yield stream
        elif file.compression == "zstd":
            with pa.CompressedInputStream(pa.PythonFile(stored, "r"), "zstd") as stream:
                yield cast(BinaryIO, stream)
        else:
            yield stored


def _text_pieces(
    file: SourceFile, config: SourceConfig, size: int, max_document_bytes: int
) -> Iterator[Piece]:
    cut = _cutter(file, config)
    line = offset = 0
    with open_file(file) as stream:
        buffer = b""
        while True:
            block = stream.read(max(size // _BLOCKS_PER_PORTION, len(buffer)))
            buffer += block
            at = cut(buffer) if block else len(buffer)
            if at:
                yield Piece(file=file, first=line, offset=offset, data=buffer[:at])
                line += buffer.count(b"\n", 0, at)
                offset += at
                buffer = buffer[at:]
            if not block:
                return
            if len(buffer) > max_document_bytes:
                raise _DocumentTooLongError(too_long(file, line, max_document_bytes))


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


def _rows_at_once(metadata: pq.FileMetaData, size: int) -> int:
    """Rows that have about `size` bytes where a row group's rows are longest; at least one."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    longest = max((g.total_byte_size / g.num_rows for g in groups if g.num_rows), default=1.0)
    return max(1, min(_PARQUET_ROWS, int(size / max(1.0, longest))))


def _parquet_pieces(file: SourceFile, config: SourceConfig, size: int) -> Iterator[Piece]:
    with open_file(file) as stream:
        parquet = pq.ParquetFile(stream)
        schema = parquet.schema_arrow
        if config.text_field not in schema.names:
            raise OSError(f"no column {config.text_field!r}; it has {', '.join(schema.names)}")
        kind = schema.field(config.text_field).type
        text = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(text) or pa.types.is_large_string(text)):
            raise OSError(f"column {config.text_field!r} holds {kind}, not text")
        row = offset = 0
        for batch in parquet.iter_batches(
            batch_size=_rows_at_once(parquet.metadata, size),
            columns=[config.text_field],
            use_threads=False,
        ):
            texts = batch.column(0).cast(pa.large_string())
            if texts.null_count:
                null = texts.is_null().to_pylist().index(True)
                raise OSError(f"row {row + null}: column {config.text_field!r} is null")
            piece = _rows_piece(file, row, offset, texts)
            yield piece
            row, offset = row + len(texts), offset + len(piece.data)


def _rows_piece(file: SourceFile, row: int, offset: int, texts: pa.LargeStringArray) -> Piece:
    _, bounds, data = texts.buffers()
    ends = np.frombuffer(bounds, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return Piece(
        file=file,
        first=row,
        offset=offset,
        data=memoryview(data)[ends[0] : ends[-1]].tobytes(),
        ends=tuple((ends[1:] - ends[0]).tolist()),
    )
