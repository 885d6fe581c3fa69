"""Shards: Parquet files with one stripe per row group, and the checks of their rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastrata_pipelines.checked_json import describe_error, file_size
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.files import CheckedStream
from elastrata_pipelines.format.manifest import PREPARE_AGAIN_ADVICE, FileEntry, Manifest
from elastrata_pipelines.retry import is_temporary
from elastrata_pipelines.storage import Storage


def offsets_of(column: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """Return the first byte of each row, followed by the end of the last row, shape [rows + 1]."""
    if len(column) == 0:
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    # A slice shares the buffers of the whole column.
    return offsets[column.offset : column.offset + len(column) + 1]


def values_of(column: pa.LargeBinaryArray, dtype: str) -> npt.NDArray[Any]:
    """Return the bytes of all rows as little-endian integers of NumPy type `dtype`."""
    ends = offsets_of(column)
    values = column.buffers()[2]
    used = (
        np.frombuffer(values, np.uint8)[ends[0] : ends[-1]] if ends[-1] else np.empty(0, np.uint8)
    )
    return used.view(np.dtype(dtype).newbyteorder("<"))


# A request to an object store takes tens of milliseconds, and most of that is waiting.
_REMOTE_SHARDS_AT_ONCE = 16
"""Number of remote shards that are read concurrently."""
_OFFSET_BYTES = 4


def shard_schema(*, packed: bool, pairs: bool) -> pa.Schema:
    """Return the columns of a shard.

    `tokens`: `length` ids as raw little-endian integers of the manifest's `token_dtype`.
    `boundaries` (packed data only): the offsets, raw little-endian int32, at which further
    documents start inside the sample; 0 is not listed.
    `second_start` (pairs only): offset of the first token of the second sentence.
    `is_next` (pairs only): whether the second sentence followed the first one in its document.
    """
    fields = [
        pa.field("sample_id", pa.uint64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("tokens", pa.large_binary(), nullable=False),
    ]
    if packed:
        fields.append(pa.field("boundaries", pa.large_binary(), nullable=False))
    if pairs:
        fields.append(pa.field("second_start", pa.int32(), nullable=False))
        fields.append(pa.field("is_next", pa.bool_(), nullable=False))
    return pa.schema(fields)


def write_shard(storage: Storage, path: str, stripes: Iterable[pa.Table]) -> FileEntry:
    """Write `stripes` as one shard, completely or not at all, and return its manifest entry.

    The bytes depend on the rows only: the file has no compression, dictionaries, statistics or
    timestamps.
    """
    samples = count = 0
    with storage.create(path) as stream:
        checked = CheckedStream(stream)
        writer: pq.ParquetWriter | None = None
        for table in stripes:
            writer = writer or _parquet_writer(checked, table.schema)
            writer.write_table(table, row_group_size=table.num_rows)
            samples += table.num_rows
            count += 1
        if writer is None:
            raise ValueError(f"{path}: a shard needs at least one stripe")
        writer.close()
    return checked.entry(path, samples=samples, stripes=count)


def _parquet_writer(stream: CheckedStream, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        stream,
        schema,
        # Token ids hardly compress, and reading them plain is 3 times faster.
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        write_page_checksum=True,
    )


def read_stripes(storage: Storage, manifest: Manifest, stripes: Sequence[int]) -> list[pa.Table]:
    """Read stripes by their numbers in the data set; return one table each, in the requested order.

    Raises:
        UserError: a shard is missing, truncated, or contradicts the manifest.
        OSError: a remote storage fails.
    """
    parts = group_by_shard(manifest, stripes)

    def read(part: tuple[FileEntry, int, list[int]]) -> dict[int, pa.Table]:
        shard, first, inside = part
        with open_shard(storage, manifest, shard) as reader:
            return {stripe: _read_stripe(reader, manifest, stripe, first) for stripe in inside}

    found: dict[int, pa.Table] = {}
    if storage.is_local or len(parts) < 2:
        for tables in map(read, parts):
            found |= tables
    else:
        with ThreadPoolExecutor(min(len(parts), _REMOTE_SHARDS_AT_ONCE)) as threads:
            for tables in threads.map(read, parts):
                found |= tables
    return [found[stripe] for stripe in stripes]


def group_by_shard(
    manifest: Manifest, stripes: Sequence[int]
) -> list[tuple[FileEntry, int, list[int]]]:
    """Return the shards that hold these stripes, in order.

    Each shard comes with the number of its first stripe, and with the requested stripes in it.
    """
    starts = manifest.first_stripes
    # Grouped, so that each shard is opened once.
    held: dict[int, list[int]] = {}
    for stripe in stripes:
        held.setdefault(bisect_right(starts, stripe) - 1, []).append(stripe)
    return [
        (manifest.shards[number], starts[number], inside) for number, inside in sorted(held.items())
    ]


def read_shard(data: bytes, storage: Storage, manifest: Manifest, shard: FileEntry) -> pa.Table:
    """Return all stripes of a shard from its bytes, concatenated.

    Raises:
        UserError: the shard contradicts the manifest.
    """
    first = manifest.first_stripes[manifest.shard_numbers[shard.path]]
    stripes = range(first, first + shard.stripes)
    with open_shard(storage, manifest, shard, data) as reader:
        return pa.concat_tables(_read_stripe(reader, manifest, stripe, first) for stripe in stripes)


@contextmanager
def open_shard(
    storage: Storage, manifest: Manifest, shard: FileEntry, data: bytes | None = None
) -> Iterator[pq.ParquetFile]:
    """Open a shard for the block, and check its footer against the manifest.

    Args:
        storage: the data set.
        manifest: its manifest.
        shard: one of its files.
        data: bytes of the shard, if they were read already.

    Raises:
        UserError: the shard is missing, damaged, or another one. Errors raised inside the block are
            converted likewise.
        OSError: a remote storage fails.
    """
    where = storage.uri(shard.path)
    try:
        if storage.is_local and data is None:
            # Raises if the path is a pipe, which would block forever when opened.
            file_size(storage, shard.path)
        opened = storage.open_scattered(shard.path) if data is None else pa.BufferReader(data)
        with opened as stream:
            yield _open_checked(stream, manifest, shard, is_local=storage.is_local)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{where}: the shard is missing") from None
    except PermissionError as error:
        raise UserError(f"{where}: may not be read ({describe_error(error)})") from None
    # Arrow raises many classes of errors for damaged bytes.
    except Exception as error:
        if is_temporary(error, is_local=storage.is_local):
            raise
        raise UserError(
            f"{where}: the shard is damaged ({describe_error(error)}); {PREPARE_AGAIN_ADVICE}"
        ) from None


def _open_checked(
    stream: Any, manifest: Manifest, shard: FileEntry, *, is_local: bool
) -> pq.ParquetFile:
    reader = pq.ParquetFile(
        stream,
        binary_type=pa.large_binary(),
        page_checksum_verification=True,
        # Reads a stripe with one request instead of one per column.
        pre_buffer=not is_local,
    )
    if reader.num_row_groups != shard.stripes or reader.metadata.num_rows != shard.samples:
        raise pa.ArrowInvalid(
            f"{reader.metadata.num_rows} samples in {reader.num_row_groups} stripes, but the "
            f"manifest says {shard.samples} in {shard.stripes}"
        )
    expected = shard_schema(packed=manifest.packing != "none", pairs=manifest.pairs)
    if not reader.schema_arrow.equals(expected):
        raise pa.ArrowInvalid(
            f"columns {', '.join(reader.schema_arrow.names)}, expected {', '.join(expected.names)} "
            "of their types"
        )
    return reader


def _read_stripe(reader: pq.ParquetFile, manifest: Manifest, stripe: int, first: int) -> pa.Table:
    """Read a stripe of a shard whose first stripe has the number `first`."""
    group = reader.metadata.row_group(stripe - first)
    columns = [group.column(number) for number in range(group.num_columns)]
    if group.num_rows != (expected := manifest.rows_of(stripe)):
        raise pa.ArrowInvalid(f"stripe {stripe}: {group.num_rows} samples, expected {expected}")
    if any(column.compression != "UNCOMPRESSED" for column in columns):
        raise pa.ArrowInvalid(f"stripe {stripe}: compressed, expected plain bytes")
    # The buffers of a column can be read directly only if it has one chunk.
    table = reader.read_row_group(stripe - first, use_threads=False).combine_chunks()
    if problem := stripe_problem(table, manifest):
        raise pa.ArrowInvalid(f"stripe {stripe}: {problem}")
    return table


def stripe_problem(table: pa.Table, manifest: Manifest) -> str | None:
    """Return the problem of a stripe's rows in one line; None if they are valid.

    Args:
        table: the columns of a shard, with one chunk each.
        manifest: manifest of the data set.
    """
    columns = {name: table[name].chunk(0) for name in table.column_names}
    if any(column.null_count for column in columns.values()):
        return "a value is missing"
    lengths = columns["length"].to_numpy()
    if not 0 < int(lengths.min()) <= int(lengths.max()) <= manifest.seq_len:
        return f"a length is not from 1 to {manifest.seq_len}"
    token_bytes = np.dtype(manifest.token_dtype).itemsize
    if not np.array_equal(np.diff(offsets_of(columns["tokens"])), lengths * np.int64(token_bytes)):
        return "a sample has not as many tokens as its length says"
    largest = int(values_of(columns["tokens"], manifest.token_dtype).max())
    if largest >= manifest.vocabulary.size:
        return f"token {largest} is not in the vocabulary of {manifest.vocabulary.size} ids"
    if "boundaries" in columns and not _are_inside(columns["boundaries"], lengths):
        return "a document inside a sample begins outside it, or before the one before it"
    if "second_start" in columns:
        starts = columns["second_start"].to_numpy()
        if not np.all((starts > 0) & (starts < lengths)):
            return "a second sentence begins outside its sample"
    return None


def _are_inside(boundaries: pa.LargeBinaryArray, lengths: npt.NDArray[np.int32]) -> bool:
    """Return whether the documents of every sample begin after its first token, in ascending
    order."""
    sizes = np.diff(offsets_of(boundaries))
    if np.any(sizes % _OFFSET_BYTES):
        return False
    rows = np.repeat(np.arange(len(lengths)), sizes // _OFFSET_BYTES)
    begins = values_of(boundaries, "int32")
    ascends = (np.diff(begins) > 0) | (np.diff(rows) > 0)
    return bool(np.all((begins > 0) & (begins < lengths[rows])) and np.all(ascends))
