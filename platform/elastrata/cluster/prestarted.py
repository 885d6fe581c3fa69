"""Prestarted processes, the spares: idle, their imports done, for the next group of workers.

A new group of workers needs new processes, and most of the seconds until it trains go to their
start and imports. Ray gives an actor an idle process only if that has the actor's runtime
environment and has never run anything, so running tasks ahead warms nothing. What does: raylets
start processes on request (`PrestartWorkers`, for which Ray has no Python call), and a setup hook
in the runtime environment makes each import at its birth. Spares are asked for by a process of the
kind they are to replace, with its own environment: they fit by construction.
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
from elastrata.cluster.ray_internals import SETUP_HOOK, prestart
from elastrata.workload.installed import expand_segments

# This file is imported at the birth of every process of a run, so it imports nothing heavy.

SPARE_BYTES = 480_000_000
"""Memory of an idle process that has the imports of a worker done (measured: 479 MB, on a CPU)."""
SECONDS_KEPT = 3600
"""After this time Ray may end a spare, where it has more idle processes than idle CPUs."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_START = 60.0
"""After which Ray gives a new process up."""
_SECONDS_TO_ANSWER = 10.0
_MODULES = "ELASTRATA_IMPORT_AHEAD"
_IDLE = "ray::IDLE"


def runtime_env(
    modules: Iterable[str], variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a runtime environment with these variables, whose processes import `modules` when
    they start."""
    return {
        "env_vars": {
            **(variables or {}),
            SETUP_HOOK: f"{__name__}.{import_ahead.__name__}",
            _MODULES: ",".join(modules),
        }
    }


def import_ahead() -> None:
    """Imports the modules of this process's runtime environment. Ray calls it, before all else."""
    expand_segments()
    for module in filter(None, os.environ.get(_MODULES, "").split(",")):
        try:
            importlib.import_module(module)
        except Exception as error:
            # An error here would end the process, and Ray would start another, again and again.
            # The worker fails with it where it uses the module; the process's log has both.
            print(f"not imported ahead: {module}: {error!r}", file=sys.stderr)


def affordable(count: int, free_bytes: int) -> int:
    """Return `count` if that many spares leave as much memory free as they take; else 0."""
    return count if free_bytes >= 2 * count * SPARE_BYTES else 0


class Spares:
    """Keeps idle processes like the caller's on the caller's node, while the caller lives.

    The caller is a task or an actor whose environment is a `runtime_env` of this module. The next
    actors with that environment, job and node take the spares, each for good; missing ones are
    replaced. Ray ends them with the job. Only Linux tells what processes there are: elsewhere there
    are no spares. An idle process that ran a task looks like a spare and serves no actor: where the
    environment also runs tasks, ask for as many more as run at a time.

    Args:
        count: of spares on this node; each takes the memory of its imports.
        after: seconds until the first is started, and until one that was taken is replaced, so that
            imports do not slow a start.
    """

    def __init__(self, count: int, *, after: float = 0.0) -> None:
        self._count, self._after = count, after
        self._closed = Event()
        if count and PROCESSES.is_dir():
            Thread(target=self._watch, name="elastrata-spares", daemon=True).start()

    def close(self) -> None:
        """No more are started. Those there are stay."""
        self._closed.set()

    def _watch(self) -> None:
        orders = Orders(self._count, after=self._after)
        while not self._closed.wait(_SECONDS_BETWEEN_LOOKS):
            if orders.is_due(_own(_is_idle), _own(_is_starting), time.monotonic()):
                with contextlib.suppress(Exception):  # a spare is a convenience; asked for again
                    _start_one()


class Orders:
    """When to ask a raylet for a spare; the clock is passed in.

    A raylet starts few processes at a time and serves requests in their order: those for the actors
    that a run waits for would come after all that it has been asked for. So there is one at a time.

    Those that are taken are taken for a group that starts: nothing is asked for until it trains.

    Args:
        count: of spares that are wanted.
        after: seconds from the first look, or since one was taken, until any is asked for.
    """

    def __init__(self, count: int, *, after: float = 0.0) -> None:
        self._count, self._after = count, after
        self._known: frozenset[int] = frozenset()
        self._ready: frozenset[int] = frozenset()
        self._taken: float | None = None
        self._asked: float | None = None

    def is_due(self, idle: Iterable[int], starting: Iterable[int], now: float) -> bool:
        """Whether to ask for one now; then it counts as asked for.

        Args:
            idle: the pids of the spares there are.
            starting: the pids of those that do not work yet.
            now: by a clock that never goes back.
        """
        ready, known = frozenset(idle), self._known
        if self._taken is None or self._ready - ready:
            self._taken = now
        self._known, self._ready = ready.union(starting), ready
        if self._known - known:
            self._asked = None
        if self._known - ready or len(ready) >= self._count or now - self._taken < self._after:
            return False
        if self._asked is not None and now - self._asked < _SECONDS_TO_START:
            return False
        self._asked = now
        return True


def waiting() -> list[int]:
    """The pids of the caller's spares: on its node, of its environment and job, idle or starting.

    A process without a `runtime_env` of this module takes plain idle processes for spares.
    """
    return _own(lambda process: _is_idle(process) or _is_starting(process))


def _own(kind: Callable[[Path], bool]) -> list[int]:
    """The pids of the processes of one kind that have the caller's environment and job."""
    own = _identity(Path("/proc/self"))
    return [
        int(process.name)
        for process in children(os.getppid())
        if kind(process) and _identity(process) == own
    ]


def _is_idle(process: Path) -> bool:
    return title(process) == _IDLE


def _is_starting(process: Path) -> bool:
    name = title(process)
    return bool(name) and not name.startswith(("ray::", ":"))


def _identity(process: Path) -> dict[str, str]:
    """Job and modules, as the process was started with them."""
    return environment(process, "RAY_JOB_ID", _MODULES)


def _start_one() -> None:
    own = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    node = next(node for node in nodes if node["NodeID"] == own)
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    prestart(address, keep_seconds=SECONDS_KEPT, seconds=_SECONDS_TO_ANSWER)
