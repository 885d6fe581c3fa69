"""Stripes of one data set or of several, read as tables of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.mixture import MixedPlaces
from elastrata_pipelines.order import Ints, Places
from elastrata_pipelines.retry import with_retries
from elastrata_pipelines.storage import Storage

_BOUNDARIES = "boundaries"


class Reader(Protocol):
    """Reads rows by their places."""

    def rows(self, places: Places) -> tuple[pa.Table, Ints]:
        """A table that holds the rows, and where they are in it."""


class Stripes:
    """Reads stripes, and keeps those of the last call.

    A group of steps mostly ends inside a window of the order, whose stripes the next one begins
    with: without this they would be read twice.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._kept: dict[int, pa.Table] = {}
        self._joined = _Joined()

    def read(self, stripes: Sequence[int]) -> list[pa.Table]:
        """The stripes of these numbers, one table each. A remote storage that does not answer for a
        while is waited for.

        Raises:
            UserError: a shard is missing or damaged.
        """
        missing = [stripe for stripe in stripes if stripe not in self._kept]
        tables = with_retries(
            lambda: read_stripes(self._storage, self._manifest, missing),
            is_local=self._storage.is_local,
        )
        known = self._kept | dict(zip(missing, tables, strict=True))
        self._kept = {stripe: known[stripe] for stripe in stripes}
        return list(self._kept.values())

    def rows(self, places: Places) -> tuple[pa.Table, Ints]:
        """The stripes that hold `places` as one table, and the places as indices into it.

        Raises:
            UserError: a shard is missing or damaged.
        """
        tables, index = self.parts(places)
        return self._joined.table(tables), index

    def parts(self, places: Places) -> tuple[list[pa.Table], Ints]:
        """The stripes that hold `places`, and the places as indices into them, end to end.

        Raises:
            UserError: a shard is missing or damaged.
        """
        numbers, which = np.unique(places.stripes, return_inverse=True)
        tables = self.read(numbers.tolist())
        starts = np.cumsum([0] + [table.num_rows for table in tables])
        return tables, starts[which] + places.rows


class MixedStripes:
    """Reads the stripes of several data sets.

    Args:
        readers: of each, in the order of the mixture.
    """

    def __init__(self, readers: Sequence[Stripes]) -> None:
        self._readers = readers
        self._joined = _Joined()

    def rows(self, places: Places) -> tuple[pa.Table, Ints]:
        """As those of one data set.

        Args:
            places: of a mixed order.

        Raises:
            UserError: a shard is missing or damaged.
        """
        assert isinstance(places, MixedPlaces), places
        tables, index, begin = list[pa.Table](), np.empty(len(places.rows), np.int64), 0
        for source, reader in enumerate(self._readers):
            inside = np.flatnonzero(places.sources == source)
            if len(inside):
                parts, own = reader.parts(places.part(inside))
                index[inside] = begin + own
                begin += sum(part.num_rows for part in parts)
                tables += parts
        return self._joined.table(tables), index


class _Joined:
    """Stripes as one table, which is kept: the first groups of a phase are small, and often lie in
    the same windows as those before."""

    def __init__(self) -> None:
        self._tables: Sequence[pa.Table] = ()
        self._table: pa.Table | None = None

    def table(self, tables: Sequence[pa.Table]) -> pa.Table:
        """The rows of all, end to end, a chunk a column."""
        if self._table is None or list(map(id, tables)) != list(map(id, self._tables)):
            self._tables, self._table = tables, None
            self._table = pa.concat_tables(_alike(tables)).combine_chunks()
        return self._table


def _alike(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Tables of the same columns: where some are packed, the others have no document inside."""
    if len({_BOUNDARIES in table.column_names for table in tables}) == 1:
        return list(tables)
    return [table if _BOUNDARIES in table.column_names else _unpacked(table) for table in tables]


def _unpacked(table: pa.Table) -> pa.Table:
    empty = pa.array([b""] * table.num_rows, pa.large_binary())
    field = pa.field(_BOUNDARIES, pa.large_binary(), nullable=False)
    return table.add_column(table.column_names.index("tokens") + 1, field, empty)
