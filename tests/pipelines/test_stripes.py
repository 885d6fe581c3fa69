"""The reader of stripes: what consecutive groups share is read once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.order import Places
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stripes import Stripes
from support.synthetic import write_data_set


def test_only_the_stripes_of_the_last_call_are_kept(tmp_path: Path) -> None:
    manifest = write_data_set(tmp_path, samples=300)
    stripes = Stripes(Storage(str(tmp_path)), manifest)
    stripes.read([0, 1, 4])
    first = stripes.read([1, 4])
    _remove_shards(tmp_path, manifest)
    assert stripes.read([1, 4]) == first
    with pytest.raises(UserError, match="the shard is missing"):
        stripes.read([0, 1])


def test_rows_of_other_stripes_are_not_those_of_the_last_ones(tmp_path: Path) -> None:
    manifest, storage = write_data_set(tmp_path, samples=300), Storage(str(tmp_path))
    stripes = Stripes(storage, manifest)
    for wanted in ([0, 1], [0, 1], [1, 0], [1, 2], [2]):
        numbers = np.array(wanted, dtype=np.int64)
        places = Places(np.zeros_like(numbers), numbers, np.arange(len(wanted)))
        table, index = stripes.rows(places)
        rows = zip(read_stripes(storage, manifest, wanted), places.rows.tolist(), strict=True)
        assert table.take(index) == pa.concat_tables(part.slice(row, 1) for part, row in rows)
        assert all(column.num_chunks == 1 for column in table.columns)


def _remove_shards(folder: Path, manifest: Manifest) -> None:
    for entry in manifest.shards:
        (folder / entry.path).unlink()
