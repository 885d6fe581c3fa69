"""What this process finds and sets before anything heavy is imported: installed workloads and the
allocator of GPU memory. Imports nothing heavy itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch's, of which it reads the first; older versions know no other."""
_SETTINGS = "expandable_segments:True"


def expand_segments() -> None:
    """Has PyTorch enlarge pieces of GPU memory in place of taking new ones: micro-batches of every
    other length leave fewer holes. Whoever has set its variable before is left alone.

    For this process and its children, before CUDA starts in them.
    """
    if not any(variable in os.environ for variable in _VARIABLES):
        os.environ[_VARIABLES[0]] = _SETTINGS


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
