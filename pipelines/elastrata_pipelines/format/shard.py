"""A shard: one Parquet file, a stripe a row group; and what its rows must hold to."""

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

from elastrata_pipelines.checked_json import file_size, reason
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.files import CheckedStream
from elastrata_pipelines.format.manifest import AGAIN, FileEntry, Manifest
from elastrata_pipelines.retry import may_pass
from elastrata_pipelines.storage import Storage


def offsets_of(column: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """Where each row's bytes begin, and where those of the last one end, shape [rows + 1]."""
    if len(column) == 0:
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    return offsets[column.offset : column.offset + len(column) + 1]


def values_of(column: pa.LargeBinaryArray, dtype: str) -> npt.NDArray[Any]:
    """The bytes of all rows as little-endian integers of NumPy's type `dtype`."""
    ends = offsets_of(column)
    values = column.buffers()[2]
    used = (
        np.frombuffer(values, np.uint8)[ends[0] : ends[-1]] if ends[-1] else np.empty(0, np.uint8)
    )
    return used.view(np.dtype(dtype).newbyteorder("<"))


_REMOTE_SHARDS_AT_ONCE = 16
"""A request to an object store takes tens of milliseconds, most of it waiting."""
_OFFSET_BYTES = 4


def shard_schema(*, packed: bool, pairs: bool) -> pa.Schema:
    """The columns of a shard.

    `tokens`: `length` ids as raw little-endian integers of the manifest's `token_dtype`.
    `boundaries` (packed data only): the offsets, raw little-endian int32, at which a new document
    starts inside the sample; 0 is not listed.
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
    """Writes `stripes` as one shard, whole or not at all, and returns its manifest entry.

    The bytes depend on the rows alone: no compression, no dictionaries, no statistics, no
    timestamps. Token ids are close to incompressible, and reading them plain is 3 times faster.
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
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        write_page_checksum=True,
    )


def read_stripes(storage: Storage, manifest: Manifest, stripes: Sequence[int]) -> list[pa.Table]:
    """Reads stripes by their numbers in the data set, one table each, in the order asked for.

    Raises:
        UserError: a shard is missing, truncated, or does not hold what the manifest says.
        OSError: a remote storage does not answer as it should.
    """
    parts = by_shard(manifest, stripes)

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


def by_shard(manifest: Manifest, stripes: Sequence[int]) -> list[tuple[FileEntry, int, list[int]]]:
    """The shards that hold stripes, in order; each with the number of its first stripe, and with
    those that it holds."""
    starts = manifest.first_stripes
    held: dict[int, list[int]] = {}
    for stripe in stripes:
        held.setdefault(bisect_right(starts, stripe) - 1, []).append(stripe)
    return [
        (manifest.shards[number], starts[number], inside) for number, inside in sorted(held.items())
    ]


def read_shard(data: bytes, storage: Storage, manifest: Manifest, shard: FileEntry) -> pa.Table:
    """All stripes of a shard whose bytes are at hand, one after another.

    Raises:
        UserError: it does not hold what the manifest says.
    """
    first = manifest.first_stripes[manifest.shard_numbers[shard.path]]
    stripes = range(first, first + shard.stripes)
    with open_shard(storage, manifest, shard, data) as reader:
        return pa.concat_tables(_read_stripe(reader, manifest, stripe, first) for stripe in stripes)


@contextmanager
def open_shard(
    storage: Storage, manifest: Manifest, shard: FileEntry, data: bytes | None = None
) -> Iterator[pq.ParquetFile]:
    """A shard whose footer is what the manifest says, to be read inside the block.

    Args:
        storage: the data set.
        manifest: its own.
        shard: one of its files.
        data: the bytes of the shard, where they are at hand.

    Raises:
        UserError: the shard is missing, damaged, or another one; also for what is raised inside the
            block.
        OSError: a remote storage does not answer as it should.
    """
    where = storage.uri(shard.path)
    try:
        if storage.is_local and data is None:
            file_size(storage, shard.path)  # whoever opens a pipe waits for ever
        opened = storage.open_scattered(shard.path) if data is None else pa.BufferReader(data)
        with opened as stream:
            yield _checked_reader(stream, manifest, shard, is_local=storage.is_local)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{where}: the shard is missing") from None
    except PermissionError as error:
        raise UserError(f"{where}: may not be read ({reason(error)})") from None
    except Exception as error:  # Arrow has many kinds for what may be wrong with bytes
        if may_pass(error, is_local=storage.is_local):
            raise
        raise UserError(f"{where}: the shard is damaged ({reason(error)}); {AGAIN}") from None


def _checked_reader(
    stream: Any, manifest: Manifest, shard: FileEntry, *, is_local: bool
) -> pq.ParquetFile:
    reader = pq.ParquetFile(
        stream,
        binary_type=pa.large_binary(),
        page_checksum_verification=True,
        pre_buffer=not is_local,  # a stripe is one request, not one for each column
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
    """A stripe of a shard whose first one has the number `first`."""
    group = reader.metadata.row_group(stripe - first)
    columns = [group.column(number) for number in range(group.num_columns)]
    if group.num_rows != (expected := manifest.rows_of(stripe)):
        raise pa.ArrowInvalid(f"stripe {stripe}: {group.num_rows} samples, expected {expected}")
    if any(column.compression != "UNCOMPRESSED" for column in columns):
        raise pa.ArrowInvalid(f"stripe {stripe}: compressed, expected plain bytes")
    table = reader.read_row_group(stripe - first, use_threads=False).combine_chunks()
    if problem := stripe_problem(table, manifest):
        raise pa.ArrowInvalid(f"stripe {stripe}: {problem}")
    return table


def stripe_problem(table: pa.Table, manifest: Manifest) -> str | None:
    """The problem of a stripe's rows, in one line; None: there is none.

    Args:
        table: with the columns of a shard, a chunk each.
        manifest: of the data set.
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
    """Whether the documents of every sample begin behind its first token, one after another."""
    sizes = np.diff(offsets_of(boundaries))
    if np.any(sizes % _OFFSET_BYTES):
        return False
    rows = np.repeat(np.arange(len(lengths)), sizes // _OFFSET_BYTES)
    begins = values_of(boundaries, "int32")
    ascends = (np.diff(begins) > 0) | (np.diff(rows) > 0)
    return bool(np.all((begins > 0) & (begins < lengths[rows])) and np.all(ascends))
