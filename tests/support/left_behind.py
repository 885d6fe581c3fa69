"""The processes that a test left behind, however they are called and whoever their parent is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from elastrata.launch.ray_processes import MARK

TEST = "ELASTRATA_TEST"
"""The variable of the environment by which a test's processes are known."""
_RAY = (b"ray::", b"/ray/core/", b"/ray/_private/", b"/ray/dashboard/", b"/ray/autoscaler/")
_numbers = count()


def begin() -> str:
    """Marks what this process starts from here on; returns the mark."""
    os.environ[TEST] = f"{os.getpid()}-{next(_numbers)}"
    return os.environ[TEST]


def sessions_of(test: str) -> list[int]:
    """Processes of the Rays that commands of the test started for themselves."""
    name = f"{MARK}=".encode()
    return [pid for pid, values in _marked(test) if any(v.startswith(name) for v in values)]


def ray_of(test: str) -> list[int]:
    """Ray's processes of the test, those of clusters that it started by itself too."""
    return [pid for pid, _ in _marked(test) if any(part in _command(pid) for part in _RAY)]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(test: str) -> Iterator[tuple[int, list[bytes]]]:
    wanted = f"{TEST}={test}".encode()
    for process in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):
            values = (process / "environ").read_bytes().split(b"\0")
            if wanted in values:
                yield int(process.name), values


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
