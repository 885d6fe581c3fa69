"""Lookup of installed workloads and setup of the GPU allocator, without heavy imports.

Both run before torch and other heavy packages are imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch reads the first variable; older versions know no other."""
_SETTINGS = "expandable_segments:True"


def expand_segments() -> None:
    """Configure PyTorch to expand segments of GPU memory, for this process and its children.

    It must be called before they start CUDA. It does nothing if the user has set the variable.
    """
    if not any(variable in os.environ for variable in _VARIABLES):
        # Micro-batches of many different lengths fragment memory less in segments that grow.
        os.environ[_VARIABLES[0]] = _SETTINGS


ENTRY_POINTS = "elastrata.workloads"


def find_workloads(wanted: str | None = None) -> Mapping[str, EntryPoint]:
    """Return the entry points of all workloads, by name."""
    if wanted is not None and wanted not in _entry_points():
        # The lookup takes 25 ms, hence the cache; `wanted` may have been installed since.
        _entry_points.cache_clear()
    return _entry_points()


@cache
def _entry_points() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
