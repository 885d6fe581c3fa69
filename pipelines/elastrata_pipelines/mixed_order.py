"""The mixed order: which stored sample of which source stands at which position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastrata_pipelines.mixture import Ints, Mixture
from elastrata_pipelines.order import Order, Places


@dataclass(frozen=True, kw_only=True)
class MixedPlaces(Places):
    """Where samples of several sources are stored, one entry per position asked for."""

    sources: Ints


@dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """The orders of several sources under a mixture. Every source has its own epochs."""

    mixture: Mixture
    orders: tuple[Order, ...]
    """That of each source."""
    firsts: tuple[int, ...]
    """The position in each source's order of the mixture's first sample of it; below 0 where the
    mixture is gone into behind its first position only."""

    def places(self, first: int, count: int) -> MixedPlaces:
        """The samples at positions first .. first + count - 1 of the mixture."""
        drawn = self.mixture.draw(first, count)
        columns = np.empty((3, count), dtype=np.int64)
        for source, (order, before) in enumerate(zip(self.orders, self.firsts, strict=True)):
            inside = np.flatnonzero(drawn.sources == source)
            if len(inside):  # numbers of one source follow on one another
                places = order.places(before + int(drawn.numbers[inside[0]]), len(inside))
                columns[:, inside] = places.epochs, places.stripes, places.rows
        epochs, stripes, rows = columns
        return MixedPlaces(epochs=epochs, stripes=stripes, rows=rows, sources=drawn.sources)
