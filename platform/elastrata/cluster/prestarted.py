"""Prestarted processes, the spares: idle, with imports done, for the next group of workers.

A new group of workers needs new processes, and most of the time until it trains is spent on their
start and imports. Ray gives an actor an idle process only if that has the actor's runtime
environment and has never run anything, so running tasks ahead warms nothing. Instead, raylets start
processes on request (`PrestartWorkers`, for which Ray has no Python call), and a setup hook in the
runtime environment does the imports when a process starts. Spares are requested by a process of the
kind that they replace, with its environment, so they always match.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray

from elastrata.cluster.processes import PROCESSES, children, environment, title
from elastrata.cluster.ray_internals import SETUP_HOOK, request_process
from elastrata.workload.installed import expand_segments

# This file is imported at the birth of every process of a run, so it imports nothing heavy.

SPARE_BYTES = 480_000_000
"""Memory of an idle process after the imports of a worker (measured on a CPU: 479 MB)."""
SECONDS_KEPT = 3600
"""Time after which Ray may end a spare, if it has more idle processes than idle CPUs."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_START = 60.0
"""Time after which Ray gives up a new process."""
_SECONDS_TO_ANSWER = 10.0
_MODULES = "ELASTRATA_IMPORT_AHEAD"
_IDLE = "ray::IDLE"


def runtime_env(
    modules: Iterable[str], variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a runtime environment with these variables, whose processes import `modules` when they
    start."""
    return {
        "env_vars": {
            **(variables or {}),
            SETUP_HOOK: f"{__name__}.{import_ahead.__name__}",
            _MODULES: ",".join(modules),
        }
    }


def import_ahead() -> None:
    """Import the modules of this process's runtime environment. Ray calls it before all else."""
    expand_segments()
    for module in filter(None, os.environ.get(_MODULES, "").split(",")):
        try:
            importlib.import_module(module)
        except Exception as error:
            # An error here would end the process, and Ray would start another, again and again.
            # The worker fails with it where it uses the module; the process's log has both.
            print(f"cannot preload {module}: {error!r}", file=sys.stderr)


def count_affordable(count: int, free_bytes: int) -> int:
    """Return `count` if that many spares leave as much memory free as they take; else 0."""
    return count if free_bytes >= 2 * count * SPARE_BYTES else 0


class SparePool:
    """Idle processes like the caller's on the caller's node, kept available while the caller lives.

    The caller is a task or an actor whose environment is a `runtime_env` of this module. The next
    actors with the same environment, job and node take the spares for good; the missing ones are
    replaced. Ray ends them with the job. There are no spares except on Linux, which lists processes
    in `/proc`.

    An idle process that ran a task looks like a spare but cannot become an actor. If the
    environment also runs tasks, add the number of tasks that run concurrently to `count`.

    Args:
        count: spares on this node; each takes the memory of its imports.
        after: delay, in seconds, before the first spare starts and before a taken one is replaced,
            so that imports do not slow a start.
    """

    def __init__(self, count: int, *, after: float = 0.0) -> None:
        self._count, self._after = count, after
        self._closed = Event()
        if count and PROCESSES.is_dir():
            Thread(target=self._watch, name="elastrata-spares", daemon=True).start()

    def close(self) -> None:
        """Start no more spares. Existing ones stay."""
        self._closed.set()

    def _watch(self) -> None:
        orders = SpareRequests(self._count, after=self._after)
        while not self._closed.wait(_SECONDS_BETWEEN_LOOKS):
            if orders.is_due(_find_own(_is_idle), _find_own(_is_starting), time.monotonic()):
                with contextlib.suppress(Exception):  # a spare is a convenience; asked for again
                    _start_one()


# A raylet starts few processes at a time and serves requests in order: with several requests
# pending, the actors that a run waits for would start last.
class SpareRequests:
    """Decides when to request a spare from a raylet; the clock is passed in.

    Only one request is pending at a time, and none is made while a group starts.

    Args:
        count: number of spares to keep.
        after: seconds from the first check, or since a spare was taken, to the next request.
    """

    def __init__(self, count: int, *, after: float = 0.0) -> None:
        self._count, self._after = count, after
        self._known: frozenset[int] = frozenset()
        self._ready: frozenset[int] = frozenset()
        self._taken_at: float | None = None
        self._requested_at: float | None = None

    def is_due(self, idle: Iterable[int], starting: Iterable[int], now: float) -> bool:
        """Return True if a spare should be requested now, and count it as requested.

        Args:
            idle: process ids of the spares that are ready.
            starting: process ids of the processes that still start.
            now: time of a monotonic clock, in seconds.
        """
        ready, known_before = frozenset(idle), self._known
        # A spare was taken: a group is starting.
        if self._taken_at is None or self._ready - ready:
            self._taken_at = now
        self._known, self._ready = ready.union(starting), ready
        # The requested process has appeared.
        if self._known - known_before:
            self._requested_at = None
        # One is starting, enough are ready, or a group is starting.
        if self._known - ready or len(ready) >= self._count or now - self._taken_at < self._after:
            return False
        if self._requested_at is not None and now - self._requested_at < _SECONDS_TO_START:
            return False
        self._requested_at = now
        return True


def find_spares() -> list[int]:
    """Return the process ids of the caller's spares: on its node, of its environment and job, idle
    or starting.

    In a process without a `runtime_env` of this module, plain idle processes count as spares.
    """
    return _find_own(lambda process: _is_idle(process) or _is_starting(process))


def _find_own(kind: Callable[[Path], bool]) -> list[int]:
    """Return the ids of the processes of one kind that have the caller's environment and job."""
    own_identity = _identity(Path("/proc/self"))
    return [
        int(process.name)
        for process in children(os.getppid())
        if kind(process) and _identity(process) == own_identity
    ]


def _is_idle(process: Path) -> bool:
    return title(process) == _IDLE


def _is_starting(process: Path) -> bool:
    # A worker's title is its command line until it is ready.
    name = title(process)
    return bool(name) and not name.startswith(("ray::", ":"))


def _identity(process: Path) -> dict[str, str]:
    """Return the job and modules that a process was started with."""
    return environment(process, "RAY_JOB_ID", _MODULES)


def _start_one() -> None:
    node_id = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    node = next(node for node in nodes if node["NodeID"] == node_id)
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    request_process(address, keep_seconds=SECONDS_KEPT, seconds=_SECONDS_TO_ANSWER)
