"""The allocator of GPU memory: how it is set before CUDA starts. Imports nothing."""

from __future__ import annotations

import os

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
