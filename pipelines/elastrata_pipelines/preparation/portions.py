"""Portions: consecutive documents of a few files, the unit of all work on a corpus.

A portion depends on the files alone, never on how many processes read them. Reading only finds a
place to cut; what is inside is looked at by whoever gets the portion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastrata_pipelines.checked_json import reason
from elastrata_pipelines.errors import in_one_line
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.json_lines import NAMED_BY
from elastrata_pipelines.preparation.pieces import (
    DocumentTooLongError,
    Piece,
    open_file,
    text_pieces,
)
from elastrata_pipelines.preparation.sources import SourceFile

_MIN_PORTION_BYTES, _MAX_PORTION_BYTES = 2 * 2**20, 64 * 2**20
_PORTIONS_AIMED_AT = 1024
_MAX_FILES = 2**14
_ROWS = 256
_SHOWN_COLUMNS = 20


@dataclass(frozen=True)
class Portion:
    """Some documents of one source, and what kept further ones from being read."""

    pieces: tuple[Piece, ...]
    problems: tuple[str, ...] = ()
    left_out: int = 0
    """Files that cannot be read, where these are skipped."""

    @property
    def bytes(self) -> int:
        """Size of the text."""
        return sum(len(piece.data) for piece in self.pieces)


def portion_bytes(total_bytes: int) -> int:
    """Text in a portion, in bytes: larger for a larger corpus, so that portions stay countable."""
    return min(max(total_bytes // _PORTIONS_AIMED_AT, _MIN_PORTION_BYTES), _MAX_PORTION_BYTES)


def group_files(files: Sequence[SourceFile], size: int) -> list[tuple[SourceFile, ...]]:
    """Consecutive files of one source, at least `size` bytes of them where there are as many.

    Very small files end a group by their number, as each of them takes memory besides its text.
    """
    groups: list[list[SourceFile]] = []
    filled = 0
    for file in files:
        fits = filled < size and groups and len(groups[-1]) < _MAX_FILES
        if not fits or file.source != groups[-1][0].source:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += file.bytes
    return [tuple(group) for group in groups]


def read_portions(
    files: Sequence[SourceFile],
    config: SourceConfig,
    *,
    size: int,
    max_document_bytes: int,
    skip: bool = False,
) -> Iterator[Portion]:
    """Reads files of one source in portions of about `size` bytes.

    A file that cannot be read to its end becomes a problem of its portion; the next ones are read.

    Args:
        files: of the source.
        config: of the source.
        size: of a portion.
        max_document_bytes: a longer document is a problem.
        skip: leave out, whole, a file that cannot be read. One that can be damaged inside is read
            to its end first, as its documents go to other processes before its end is known.
    """
    pieces: list[Piece] = []
    problems: list[str] = []
    filled = left_out = 0
    for file in files:
        begun = False
        try:
            if skip and (file.compression or file.kind == "parquet"):
                deque(_pieces(file, config, size, max_document_bytes), maxlen=0)
            for piece in _pieces(file, config, size, max_document_bytes):
                begun = True
                pieces.append(piece)
                filled += len(piece.data)
                if filled >= size:
                    yield Portion(tuple(pieces), tuple(problems), left_out)
                    pieces, problems, filled, left_out = [], [], 0, 0
        except DocumentTooLongError as error:
            problems.append(str(error))
        except Exception as error:  # every store, compression and format has its own
            if skip and not begun:
                left_out += 1
            else:
                problems.append(f"{file.shown}: cannot be read ({in_one_line(reason(error))})")
    if pieces or problems or left_out:
        yield Portion(tuple(pieces), tuple(problems), left_out)


def _pieces(
    file: SourceFile, config: SourceConfig, size: int, max_document_bytes: int
) -> Iterator[Piece]:
    if file.kind == "parquet":
        return parquet_pieces(file, config, size)
    return text_pieces(file, config, size, max_document_bytes)


def parquet_pieces(file: SourceFile, config: SourceConfig, size: int) -> Iterator[Piece]:
    """The rows of a file, in pieces of at most some hundred rows and about `size` bytes.

    Raises:
        Exception: of a file that cannot be read, or has not one column of text of that name.
    """
    with open_file(file) as stream:
        parquet = pq.ParquetFile(stream, page_checksum_verification=True)
        _check_column(parquet.schema_arrow, config.text_field)
        row = offset = 0
        for batch in parquet.iter_batches(
            batch_size=_rows_at_once(parquet.metadata, size),
            columns=[config.text_field],
            use_threads=False,
        ):
            piece = _rows_piece(file, row, offset, batch.column(0).cast(pa.large_string()))
            yield piece
            row, offset = row + batch.num_rows, offset + len(piece.data)


def _check_column(schema: pa.Schema, name: str) -> None:
    count = schema.names.count(name)
    if count != 1:
        some = ", ".join(map(in_one_line, schema.names[:_SHOWN_COLUMNS]))
        more = ", ..." if len(schema.names) > _SHOWN_COLUMNS else ""
        found = f"{count} columns are named {name!r}" if count else f"no column {name!r}"
        raise OSError(f"{found} ({NAMED_BY}); it has {some}{more}")
    kind = schema.field(name).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_text(text) for is_text in _TEXT_TYPES):
        raise OSError(f"column {name!r} holds {kind}, not text")


_TEXT_TYPES: tuple[Any, ...] = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
)


def _rows_at_once(metadata: pq.FileMetaData, size: int) -> int:
    """Rows that have about `size` bytes where a row group's rows are longest; at least one."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    longest = max((g.total_byte_size / g.num_rows for g in groups if g.num_rows), default=1.0)
    return max(1, min(_ROWS, int(size / max(1.0, longest))))


def _rows_piece(file: SourceFile, row: int, offset: int, texts: pa.LargeStringArray) -> Piece:
    _, bounds, data = texts.buffers()
    ends = np.frombuffer(bounds, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return Piece(
        file=file,
        first=row,
        offset=offset,
        data=memoryview(data)[ends[0] : ends[-1]].tobytes(),
        ends=tuple((ends[1:] - ends[0]).tolist()),
        missing=tuple(np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False)).tolist()),
    )
