"""Readers that return the rows of stripes, of one data set or several, as tables."""

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
        """Return a table that holds the rows, and the index of each row in it."""


class Stripes:
    """Reads stripes of one data set, and keeps those of the last call."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        # A group of steps mostly ends inside a window of the order, and the next group begins with
        # the stripes of that window: without this cache they would be read twice.
        self._kept: dict[int, pa.Table] = {}
        self._joined = _JoinedTables()

    def read(self, stripes: Sequence[int]) -> list[pa.Table]:
        """Return one table for each of these stripes. Reads of a remote storage are retried.

        Raises:
            UserError: a shard is missing or damaged.
        """
        missing = [stripe for stripe in stripes if stripe not in self._kept]
        tables = with_retries(
            lambda: read_stripes(self._storage, self._manifest, missing),
            is_local=self._storage.is_local,
        )
        table_by_stripe = self._kept | dict(zip(missing, tables, strict=True))
        # Only the requested stripes are kept, which bounds memory.
        self._kept = {stripe: table_by_stripe[stripe] for stripe in stripes}
        return list(self._kept.values())

    def rows(self, places: Places) -> tuple[pa.Table, Ints]:
        """Return the stripes that hold `places` as one table, and the places as indices into it.

        Raises:
            UserError: a shard is missing or damaged.
        """
        tables, index = self.parts(places)
        return self._joined.table(tables), index

    def parts(self, places: Places) -> tuple[list[pa.Table], Ints]:
        """Return the stripes that hold `places`, and the places as indices into their
        concatenation.

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
        readers: reader of each data set, in the order of the mixture.
    """

    def __init__(self, readers: Sequence[Stripes]) -> None:
        self._readers = readers
        self._joined = _JoinedTables()

    def rows(self, places: Places) -> tuple[pa.Table, Ints]:
        """Return the stripes that hold `places` as one table, and the places as indices into it.

        Args:
            places: places of a mixed order.

        Raises:
            UserError: a shard is missing or damaged.
        """
        assert isinstance(places, MixedPlaces), places
        tables, index, begin = list[pa.Table](), np.empty(len(places.rows), np.int64), 0
        for source, reader in enumerate(self._readers):
            inside = np.flatnonzero(places.sources == source)
            if len(inside):
                parts, own_index = reader.parts(places.part(inside))
                index[inside] = begin + own_index
                begin += sum(part.num_rows for part in parts)
                tables += parts
        return self._joined.table(tables), index


class _JoinedTables:
    """Concatenates stripes to one table, and keeps the result for the next call."""

    def __init__(self) -> None:
        self._tables: Sequence[pa.Table] = ()
        self._table: pa.Table | None = None

    def table(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Return the rows of all tables as one table with one chunk per column."""
        # The first groups of a phase are small and often read the same stripes as the group before.
        # Tables are compared by identity, since comparing values would take longer than
        # concatenating.
        if self._table is None or list(map(id, tables)) != list(map(id, self._tables)):
            # Release the old table first, so that two are never held at the same time.
            self._tables, self._table = tables, None
            self._table = pa.concat_tables(_unify_columns(tables)).combine_chunks()
        return self._table


def _unify_columns(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Return tables with the same columns: if some are packed, the others get empty boundaries."""
    if len({_BOUNDARIES in table.column_names for table in tables}) == 1:
        return list(tables)
    return [
        table if _BOUNDARIES in table.column_names else _add_empty_boundaries(table)
        for table in tables
    ]


def _add_empty_boundaries(table: pa.Table) -> pa.Table:
    empty = pa.array([b""] * table.num_rows, pa.large_binary())
    field = pa.field(_BOUNDARIES, pa.large_binary(), nullable=False)
    return table.add_column(table.column_names.index("tokens") + 1, field, empty)
