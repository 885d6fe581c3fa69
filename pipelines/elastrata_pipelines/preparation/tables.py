"""Tables: reads text from JSON Lines, and from a column of a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastrata_pipelines.errors import UserError, escape_unprintable, suggest_nearest
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.pieces import Piece
from elastrata_pipelines.preparation.sources import SourceFile

NAMED_BY = "text_field, --text-field"
"""Recipe key and option that name the field or column with the text."""
_SHOWN_FIELDS, _SHOWN_CHARACTERS = 20, 60


def text_of_line(raw: bytes, field: str) -> str:
    """Return the text in one field of the JSON object in a line.

    Raises:
        UserError: the line is no JSON object, or the field is missing, duplicated, or not text.
    """
    row = _parse(raw)
    if not isinstance(row, dict):
        raise UserError(f"a JSON object was expected, not {type(row).__name__}")
    text = _find_field(row, field)
    if text is _MISSING:
        raise UserError(
            f"no field {field!r} ({NAMED_BY}); it has {_list_names(row)}"
            f"{_suggest_field(field, _text_fields(row))}"
        )
    if not isinstance(text, str):
        raise UserError(f"field {field!r} is {type(text).__name__}, not text")
    # Only an escape can produce half of a surrogate pair: the line itself is valid UTF-8.
    if b"\\u" in raw and not is_encodable(text):
        raise UserError(f"field {field!r} holds half of a surrogate pair")
    # The cheap test avoids parsing nearly all lines a second time.
    if raw.count(f'"{field}"'.encode()) > 1 and _count_field(raw, field) > 1:
        raise UserError(f"field {field!r} is there twice")
    return text


_MISSING = object()


def _find_field(row: Any, field: str) -> Any:
    """Return the value of a field, `a.b` for the field b of the object in a."""
    if not isinstance(row, dict):
        return _MISSING
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    return _find_field(row.get(outer), inner) if dot else _MISSING


def _text_fields(row: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the name of every field with text, nested ones too."""
    for name, value in row.items():
        if isinstance(value, str):
            yield prefix + name
        elif isinstance(value, dict):
            yield from _text_fields(value, f"{prefix}{name}.")


def _suggest_field(field: str, text_fields: Iterable[str]) -> str:
    """Return a hint at the nearest of the fields with text."""
    names = [name for name in text_fields if len(name) <= _SHOWN_CHARACTERS]
    # The text may be in a nested field of that name.
    ends = [name for name in names if name.rpartition(".")[2] == field]
    return suggest_nearest(ends[0] if ends else field, names)


def is_encodable(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8, which half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(raw: bytes) -> Any:
    try:
        # json.loads detects UTF-16 in bytes that look like it, and accepts halves of surrogate
        # pairs.
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 (byte {error.start} of the line)") from None
    except RecursionError:
        raise UserError("nested too deeply to be read") from None
    except ValueError as error:
        raise UserError(f"not valid JSON ({error})") from None


def _list_names(row: dict[str, Any]) -> str:
    names = [escape_unprintable(name[:_SHOWN_CHARACTERS]) for name in list(row)[:_SHOWN_FIELDS]]
    return ", ".join(names + ["..."] * (len(row) > _SHOWN_FIELDS)) or "none"


def _count_field(raw: bytes, field: str) -> int:
    """Return how often the outer object of a line contains a field."""
    outer: list[tuple[str, Any]] = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=list)
    return [name for name, _ in outer].count(field)


_ROWS = 256
_SHOWN_COLUMNS = 20


def parquet_pieces(
    file: SourceFile, stream: Any, config: SourceConfig, size: int
) -> Iterator[Piece]:
    """Yield the rows of a file in pieces of at most `_ROWS` rows and about `size` bytes.

    Args:
        file: the file.
        stream: seekable stream of its uncompressed bytes.
        config: configuration of the source.
        size: approximate size of a piece.

    Raises:
        Exception: the file cannot be read, or does not have exactly one text column of that name.
    """
    parquet = pq.ParquetFile(stream, page_checksum_verification=True)
    _check_column(parquet.schema_arrow, config.text_field)
    row = offset = 0
    for batch in parquet.iter_batches(
        batch_size=_rows_at_once(parquet.metadata, size),
        columns=[config.text_field],
        use_threads=False,
    ):
        column = batch.column(0)
        while pa.types.is_struct(column.type):
            # Only the requested field was read.
            column = pc.struct_field(column, [0])
        piece = _rows_piece(file, row, offset, column.cast(pa.large_string()))
        yield piece
        row, offset = row + batch.num_rows, offset + len(piece.data)


def _check_column(schema: pa.Schema, name: str) -> None:
    kinds = dict(_columns(schema))
    count = schema.names.count(name)
    if count > 1 or name not in kinds:
        some = ", ".join(map(escape_unprintable, schema.names[:_SHOWN_COLUMNS]))
        more = ", ..." if len(schema.names) > _SHOWN_COLUMNS else ""
        found = f"{count} columns are named {name!r}" if count else f"no column {name!r}"
        texts = [other for other, kind in kinds.items() if _is_text(kind)]
        hint = "" if count else _suggest_field(name, texts)
        raise OSError(f"{found} ({NAMED_BY}); it has {some}{more}{hint}")
    if not _is_text(kinds[name]):
        raise OSError(f"column {name!r} holds {kinds[name]}, not text")


def _columns(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """Yield the name and type of every column, `a.b` for the field b of the structs in a."""
    for field in fields:
        yield prefix + field.name, field.type
        if pa.types.is_struct(field.type):
            yield from _columns(field.type, f"{prefix}{field.name}.")


def _is_text(kind: pa.DataType) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(is_text(plain) for is_text in _TEXT_TYPES)


_TEXT_TYPES: tuple[Any, ...] = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
)


def _rows_at_once(metadata: pq.FileMetaData, size: int) -> int:
    """Return the number of rows with about `size` bytes in the row group with the longest rows.

    The result is at least 1.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    longest = max((g.total_byte_size / g.num_rows for g in groups if g.num_rows), default=1.0)
    # Compressed sizes are smaller than the text, so the number of rows is limited as well.
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
