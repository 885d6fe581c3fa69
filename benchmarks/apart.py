"""A process of its own for a case: memory, compiled code and process groups begin anew."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What it returns in a new process, whose memory and compiled code are its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()
