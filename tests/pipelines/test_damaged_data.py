"""Files of a data set that lie: whatever is in them, a reader tells it in a line."""

from __future__ import annotations

import io
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastrata.run.audit import expectation
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import (
    FileEntry,
    Manifest,
    read_stripes,
    shard_schema,
    write_file,
    write_shard,
)
from elastrata_pipelines.format.manifest import LENGTHS
from elastrata_pipelines.inspection import verify
from elastrata_pipelines.storage import Storage
from support.synthetic import Sizes, fields_of, write_data_set

SHARD = "shards/00000.parquet"
Columns = dict[str, list[Any]]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    write_data_set(tmp_path, samples=20, sizes=Sizes(seq_len=12, stripe=8), pairs=True)
    return Storage(str(tmp_path))


def _with_file(storage: Storage, entry: FileEntry, **changes: Any) -> Manifest:
    """Writes a manifest that vouches for another file under the same path."""
    manifest = Manifest.read(storage)
    files = tuple(entry if old.path == entry.path else old for old in manifest.files)
    Manifest(**{**fields_of(manifest), "files": files, **changes}).write(storage)
    return Manifest.read(storage)


def _saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _lengths(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], bytes]:
    return lambda lengths: _saved(change(lengths))


def _huge(lengths: np.ndarray) -> bytes:
    """A header that asks for eight terabytes."""
    return _saved(lengths).replace(b"(20,), }            ", b"(2000000000000,), } ")


def _first_is_minus_one(lengths: np.ndarray) -> np.ndarray:
    lengths[:2] = -1, lengths[:2].sum() + 1
    return lengths


INDICES: dict[str, tuple[Callable[[np.ndarray], bytes], str]] = {
    "huge": (_huge, "2000000000000 numbers, expected 20"),
    "object": (_lengths(lambda a: a.astype(object)), "not an array of int32"),
    "other type": (_lengths(lambda a: a.astype(np.int64)), "not an array of int32"),
    "big-endian": (_lengths(lambda a: a.astype(">i4")), "not an array of int32"),
    "matrix": (_lengths(lambda a: np.asfortranarray(a.reshape(4, 5))), "not an array of int32"),
    "one less": (_lengths(lambda a: a[1:]), "19 numbers, expected 20"),
    "negative": (_lengths(_first_is_minus_one), "not the lengths that the manifest's histogram"),
    "other lengths": (_lengths(lambda a: a * 0 + 1), "not the lengths that the manifest's histog"),
    "torn": (lambda a: _saved(a)[:-1], "207 bytes, expected 208"),
    "longer": (lambda a: _saved(a) + b"\0", "209 bytes, expected 208"),
    "python": (lambda a: b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 118, "not an array of int32"),
    "empty": (lambda a: b"", "not an array of int32"),
}


@pytest.mark.parametrize("what", INDICES)
def test_an_index_that_lies_is_refused(storage: Storage, what: str) -> None:
    make, line = INDICES[what]
    lengths = Manifest.read(storage).read_lengths(storage).copy()
    manifest = _with_file(storage, write_file(storage, LENGTHS, make(lengths)))
    tracemalloc.start()
    with pytest.raises(UserError, match=line) as caught:
        manifest.read_lengths(storage)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    (told,) = caught.value.problems
    assert told.startswith(f"{storage.uri(LENGTHS)}: ")
    assert verify(storage) == [told]


def _columns(storage: Storage) -> Columns:
    """The columns of the first stripe."""
    found: Columns = read_stripes(storage, Manifest.read(storage), [0])[0].to_pydict()
    return found


def _cut_tokens(columns: Columns) -> None:
    columns["tokens"][3] = columns["tokens"][3][:-2]


def _half_a_token(columns: Columns) -> None:
    columns["tokens"][3] += b"\0"


def _token_beyond(columns: Columns) -> None:
    columns["tokens"][3] = b"\x61\0" + columns["tokens"][3][2:]


def _length_beyond(columns: Columns) -> None:
    columns["length"][0] = 13
    columns["tokens"][0] = b"\5\0" * 13


def _no_length(columns: Columns) -> None:
    columns["length"][7], columns["tokens"][7] = 0, b""


def _second_beyond(columns: Columns) -> None:
    columns["second_start"][2] = columns["length"][2]


def _other_order(columns: Columns) -> None:
    for values in columns.values():
        values.reverse()


ROWS: dict[str, tuple[Callable[[Columns], None], str]] = {
    "tokens cut": (_cut_tokens, "a sample has not as many tokens as its length says"),
    "half a token": (_half_a_token, "a sample has not as many tokens as its length says"),
    "token beyond": (_token_beyond, "token 97 is not in the vocabulary of 97 ids"),
    "length beyond": (_length_beyond, "a length is not from 1 to 12"),
    "no length": (_no_length, "a length is not from 1 to 12"),
    "second sentence beyond": (_second_beyond, "a second sentence begins outside its sample"),
}


def _rewritten(storage: Storage, change: Callable[[Columns], None]) -> Manifest:
    """The data set with another first stripe, which its manifest vouches for."""
    manifest = Manifest.read(storage)
    columns = _columns(storage)
    change(columns)
    stripes = [
        pa.table(columns, schema=shard_schema(packed=False, pairs=True)),
        *read_stripes(storage, manifest, range(1, manifest.shards[0].stripes)),
    ]
    return _with_file(storage, write_shard(storage, SHARD, stripes))


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_cannot_be_are_refused(storage: Storage, what: str) -> None:
    change, line = ROWS[what]
    manifest = _rewritten(storage, change)
    with pytest.raises(UserError) as caught:
        read_stripes(storage, manifest, [0])
    (told,) = caught.value.problems
    assert told.startswith(f"{storage.uri(SHARD)}: the shard is damaged (stripe 0: {line})")
    assert verify(storage) == [told]
    read_stripes(storage, manifest, [1])


def test_samples_in_another_order_than_the_index_has_are_found(storage: Storage) -> None:
    _rewritten(storage, _other_order)
    assert verify(storage) == [f"{storage.uri(SHARD)}: its lengths are not those in the index"]


def _packed(storage: Storage, boundaries: list[list[int]]) -> list[str]:
    """What is wrong with a packed data set of two samples of nine tokens."""
    schema = shard_schema(packed=True, pairs=False)
    inside = [np.array(starts, "<i4").tobytes() for starts in boundaries]
    table = pa.table([[1, 2], [9, 9], [bytes(18), bytes(18)], inside], schema=schema)
    shard = write_shard(storage, SHARD, [table])
    index = write_file(storage, LENGTHS, _saved(np.array([9, 9], np.int32)))
    values = fields_of(Manifest.read(storage))
    values |= {"samples": 2, "tokens": 18, "stripes": 1, "packing": "concat", "pairs": False}
    values |= {"length_histogram": (0,) * 9 + (2, 0, 0, 0), "files": (shard, index)}
    Manifest(**values).write(storage)
    return verify(storage)


def test_documents_of_a_packed_sample_begin_one_after_another(storage: Storage) -> None:
    assert _packed(storage, [[1, 8], []]) == []
    assert _packed(storage, [[], [4]]) == []
    for wrong in ([[0], []], [[9], []], [[], [-1]], [[5, 5], []], [[5, 3], [1]]):
        (line,) = _packed(storage, wrong)
        assert "a document inside a sample begins outside it, or before the one before it" in line


SHARDS: dict[str, tuple[Callable[[pa.Table, Path], None], str]] = {
    "other columns": (
        lambda table, path: pq.write_table(table.drop(["length"]), path, row_group_size=8),
        "columns sample_id, tokens, second_start, is_next, expected sample_id, length, tokens",
    ),
    "another type": (
        lambda table, path: pq.write_table(
            table.set_column(1, "length", table["length"].cast(pa.int64())), path, row_group_size=8
        ),
        "columns sample_id, length, tokens, second_start, is_next, expected sample_id, length",
    ),
    "other row groups": (
        lambda table, path: pq.write_table(table, path, row_group_size=10, compression="none"),
        "stripe 0: 10 samples, expected 8",
    ),
    "one row group": (
        lambda table, path: pq.write_table(table, path, compression="none"),
        "16 samples in 1 stripes, but the manifest says 16 in 2",
    ),
    "compressed": (
        lambda table, path: pq.write_table(table, path, row_group_size=8, compression="zstd"),
        "stripe 0: compressed, expected plain bytes",
    ),
    "no Parquet": (lambda table, path: path.write_bytes(b"PAR1" * 100), "the shard is damaged"),
    "empty": (lambda table, path: path.write_bytes(b""), "the shard is damaged"),
}


@pytest.mark.parametrize("what", SHARDS)
def test_another_shard_is_refused(storage: Storage, what: str) -> None:
    write, line = SHARDS[what]
    manifest = Manifest.read(storage)
    first, second = read_stripes(storage, manifest, [0, 1])
    write(pa.concat_tables([first, second]), Path(storage.path(SHARD)))
    entry = manifest.shards[0].model_copy(
        update={"bytes": storage.size(SHARD), "sha256": storage.sha256(SHARD)}
    )
    manifest = _with_file(storage, entry)
    with pytest.raises(UserError) as caught:
        read_stripes(storage, manifest, [0])
    (told,) = caught.value.problems
    assert told.startswith(f"{storage.uri(SHARD)}: ")
    assert line in told
    assert verify(storage) == [told]


def test_what_is_no_file_is_told_and_not_waited_for(storage: Storage) -> None:
    manifest = Manifest.read(storage)
    for path in (SHARD, LENGTHS):
        stored = Path(storage.path(path))
        stored.unlink()
        os.mkfifo(stored)
        line = f"{stored}: a device, pipe or socket, expected a file"
        assert line in verify(storage)
    with pytest.raises(UserError, match="a device, pipe or socket, expected a file"):
        read_stripes(storage, manifest, [0])
    with pytest.raises(UserError, match="a device, pipe or socket, expected a file"):
        expectation(storage, manifest, seed=0, window_stripes=1)
