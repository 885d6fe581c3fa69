"""A process whose core is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ALWAYS = "while True: pass"


@contextmanager
def busy_neighbours(process: psutil.Process, number: int) -> Iterator[None]:
    """While the block runs, or until it is gone, a process has one core, which it shares with so
    many that always compute."""
    every = os.sched_getaffinity(process.pid)
    core = {min(every)}
    # In a session of its own each, which some kernels give the same time.
    neighbours = [
        subprocess.Popen([sys.executable, "-c", ALWAYS], start_new_session=True)
        for _ in range(number)
    ]
    try:
        for neighbour in neighbours:  # Ray's workers are nice
            psutil.Process(neighbour.pid).nice(process.nice())
        _keep_on(core, [neighbour.pid for neighbour in neighbours])
        _keep_on(core, _threads(process))
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
        _keep_on(every, _threads(process))


def _threads(process: psutil.Process) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir()]
    return []


def _keep_on(cores: set[int], threads: Iterable[int]) -> None:
    for thread in threads:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)
