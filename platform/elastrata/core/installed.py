"""The workloads that are installed, by the entry points of their packages. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

ENTRY_POINTS = "elastrata.workloads"


def installed_workloads(wanted: str | None = None) -> Mapping[str, EntryPoint]:
    """All of them, by name.

    Looked up once, as it takes 25 ms; again where `wanted` is not among them, for what was
    installed since.
    """
    if wanted is not None and wanted not in _found():
        _found.cache_clear()
    return _found()


@cache
def _found() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
