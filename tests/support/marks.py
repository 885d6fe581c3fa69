"""The mark by which the processes of a test are known: a variable of their environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

VARIABLE = "ELASTRATA_TEST"
OURS = uuid4().hex
"""How all marks of this process begin."""
_numbers = count()


def begin() -> str:
    """Marks what this process starts from here on; returns the mark."""
    os.environ[VARIABLE] = f"{OURS}-{next(_numbers)}"
    return os.environ[VARIABLE]


def marked(start: str) -> Iterator[int]:
    """The ids of the processes, but for this one, whose mark begins so.

    It is that of their start: a fork has that of the process which it was forked from.
    """
    wanted = f"{VARIABLE}={start}".encode()
    for process in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            is_marked = any(variable.startswith(wanted) for variable in variables)
            if is_marked and int(process.name) != os.getpid():
                yield int(process.name)
