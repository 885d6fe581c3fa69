"""A shard: one Parquet file, a stripe a row group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.checked import CheckedStream
from elastrata_pipelines.format.manifest import FileEntry, Manifest
from elastrata_pipelines.patience import may_pass
from elastrata_pipelines.storage import Storage

_REMOTE_SHARDS_AT_ONCE = 16
"""A request to an object store takes tens of milliseconds, most of it waiting."""


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
    parts: list[tuple[FileEntry, int, list[int]]] = []
    first = 0
    for shard in manifest.shards:
        if inside := [stripe for stripe in stripes if first <= stripe < first + shard.stripes]:
            parts.append((shard, first, inside))
        first += shard.stripes

    def read(part: tuple[FileEntry, int, list[int]]) -> dict[int, pa.Table]:
        shard, first, inside = part
        tables = _read_row_groups(storage, shard, [stripe - first for stripe in inside])
        return dict(zip(inside, tables, strict=True))

    found: dict[int, pa.Table] = {}
    if storage.is_local or len(parts) < 2:
        for tables in map(read, parts):
            found |= tables
    else:
        with ThreadPoolExecutor(min(len(parts), _REMOTE_SHARDS_AT_ONCE)) as threads:
            for tables in threads.map(read, parts):
                found |= tables
    return [found[stripe] for stripe in stripes]


def _read_row_groups(storage: Storage, shard: FileEntry, groups: Sequence[int]) -> list[pa.Table]:
    try:
        with storage.open_scattered(shard.path) as stream:
            reader = pq.ParquetFile(
                stream,
                binary_type=pa.large_binary(),
                page_checksum_verification=True,
                pre_buffer=not storage.is_local,  # a stripe is one request, not one for each column
            )
            if reader.num_row_groups != shard.stripes or reader.metadata.num_rows != shard.samples:
                raise UserError(
                    f"{storage.uri(shard.path)}: {reader.metadata.num_rows} samples in "
                    f"{reader.num_row_groups} stripes, but the manifest says {shard.samples} in "
                    f"{shard.stripes}; prepare the data set again"
                )
            return [reader.read_row_group(group, use_threads=False) for group in groups]
    except FileNotFoundError:
        raise UserError(f"{storage.uri(shard.path)}: the shard is missing") from None
    except PermissionError as error:
        raise UserError(f"{storage.uri(shard.path)}: may not be read ({error})") from None
    except (pa.ArrowInvalid, OSError) as error:
        if may_pass(error, is_local=storage.is_local):
            raise
        raise UserError(f"{storage.uri(shard.path)}: the shard is damaged ({error})") from None
