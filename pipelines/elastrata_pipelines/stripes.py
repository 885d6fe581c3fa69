"""The stripes of a data set, read once for consecutive groups that share them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.patience import read_patiently
from elastrata_pipelines.storage import Storage


class Stripes:
    """Reads stripes, and keeps those of the last call.

    A group of steps mostly ends inside a window of the order, whose stripes the next one begins
    with: without this they would be read twice.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._kept: dict[int, pa.Table] = {}

    def read(self, stripes: Sequence[int]) -> list[pa.Table]:
        """The stripes of these numbers, one table each. A remote storage that does not answer for a
        while is waited for.

        Raises:
            UserError: a shard is missing or damaged.
        """
        missing = [stripe for stripe in stripes if stripe not in self._kept]
        tables = read_patiently(
            lambda: read_stripes(self._storage, self._manifest, missing),
            is_local=self._storage.is_local,
        )
        known = self._kept | dict(zip(missing, tables, strict=True))
        self._kept = {stripe: known[stripe] for stripe in stripes}
        return list(self._kept.values())
