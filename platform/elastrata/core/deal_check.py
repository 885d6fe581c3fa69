"""The check that all ranks have hands of one deal: a reading task that was lost and done again must
deal as it did before."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from elastrata_pipelines.speeds import Speeds


def deal_marks(speeds: Speeds) -> dict[str, float]:
    """The numbers of this rank that are added up over all primary ranks, by name."""
    return {"hands": 1, "dealt_by": _mark(speeds)}


def check_same_deal(sums: Mapping[str, float], speeds: Speeds) -> None:
    """Looks whether the sums say that all ranks were dealt to by these speeds. Where deals differ,
    at least one rank has speeds: ranks that have none need not look.

    Raises:
        RuntimeError: they were not; the group is to begin again.
    """
    if speeds and sums["dealt_by"] != sums["hands"] * _mark(speeds):
        raise RuntimeError("the ranks have hands of different deals")


def _mark(speeds: Speeds) -> int:
    return zlib.crc32(repr(speeds).encode()) if speeds else 0
