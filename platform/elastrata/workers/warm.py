"""Warm spares: idle processes that have imported what a worker imports, for the next group.

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._private.utils import get_runtime_env_info
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
from ray.runtime_env import RuntimeEnv

SECONDS_KEPT = 3600
"""After this time Ray may end a spare, where it has more idle processes than idle CPUs."""
_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_TO_ANSWER = 10.0
_MODULES = "ELASTRATA_IMPORT_AHEAD"
_PROCESSES = Path("/proc")


def runtime_env(modules: Iterable[str]) -> dict[str, Any]:
    """A runtime environment whose processes import `modules` at their birth."""
    return {
        "env_vars": {
            WORKER_PROCESS_SETUP_HOOK_ENV_VAR: f"{__name__}.{import_ahead.__name__}",
            _MODULES: ",".join(modules),
        }
    }


def import_ahead() -> None:
    """Imports the modules of this process's runtime environment. Ray calls it, before all else."""
    for module in os.environ.get(_MODULES, "").split(","):
        # What cannot be imported is told where it is used: an error here would end the process,
        # and Ray would start another, again and again.
        with contextlib.suppress(Exception):
            importlib.import_module(module)


class Spares:
    """Keeps idle processes like the caller's on the caller's node, while the caller lives.

    The caller is a task or an actor whose environment is a `runtime_env` of this module. The next
    actors with that environment, job and node take the spares, each for good; missing ones are
    replaced. Ray ends them with the job. Only Linux tells what processes there are: elsewhere there
    are no spares. An idle process that ran a task looks like a spare and serves no actor: where the
    environment also runs tasks, ask for as many more as run at a time.

    Args:
        count: of spares on this node; each takes the memory of its imports.
        after: seconds until the first is started, so that imports do not slow a start.
    """

    def __init__(self, count: int, *, after: float = 0.0) -> None:
        self._count, self._after = count, after
        self._closed = Event()
        if count and _PROCESSES.is_dir():
            Thread(target=self._watch, name="elastrata-spares", daemon=True).start()

    def close(self) -> None:
        """No more are started. Those there are stay."""
        self._closed.set()

    def _watch(self) -> None:
        wait = self._after
        while not self._closed.wait(wait):
            # A raylet that starts as many processes as it has CPUs forgets what else it was asked.
            if missing := self._count - len(waiting()):
                with contextlib.suppress(Exception):  # a spare is a convenience; asked for again
                    _start(missing)
            wait = _SECONDS_BETWEEN_LOOKS


def waiting() -> list[int]:
    """The pids of the caller's spares: on its node, of its environment and job, idle or starting.

    A process without a `runtime_env` of this module takes plain idle processes for spares.
    """
    own = _identity(Path("/proc/self"))
    return [
        int(process.name)
        for process in _siblings()
        if _is_waiting(process) and _identity(process) == own
    ]


def _siblings() -> Iterator[Path]:
    """The processes that the caller's raylet started."""
    for process in _PROCESSES.iterdir():
        with contextlib.suppress(OSError, ValueError):
            if process.name.isdigit() and _parent(process) == os.getppid():
                yield process


def _parent(process: Path) -> int:
    # the name, in brackets, may hold spaces and brackets
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def _is_waiting(process: Path) -> bool:
    with contextlib.suppress(OSError):
        title = (process / "cmdline").read_bytes().partition(b"\0")[0]
        return title == b"ray::IDLE" or not title.startswith((b"ray::", b":"))
    return False


def _identity(process: Path) -> set[bytes]:
    """Job, hook and modules, as the process was started with them."""
    names = tuple(f"{n}=".encode() for n in ("RAY_JOB_ID", _MODULES))
    with contextlib.suppress(OSError):
        environment = (process / "environ").read_bytes().split(b"\0")
        return {entry for entry in environment if entry.startswith(names)}
    return set()


def _start(count: int) -> None:
    own = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    node = next(node for node in nodes if node["NodeID"] == own)
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    with contextlib.closing(init_grpc_channel(address)) as channel:
        raylet = node_manager_pb2_grpc.NodeManagerServiceStub(channel)  # type: ignore[no-untyped-call]
        raylet.PrestartWorkers(_request(count), timeout=_SECONDS_TO_ANSWER)


def _request(count: int) -> Any:
    context = ray.get_runtime_context()
    serialized = context.get_runtime_env_string()  # type: ignore[no-untyped-call]
    environment = get_runtime_env_info(RuntimeEnv.deserialize(serialized))
    environment.serialized_runtime_env = serialized  # compared by its hash: not a byte may differ
    return node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
        language=common_pb2.Language.PYTHON,  # type: ignore[attr-defined]
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=environment,
        keep_alive_duration_secs=SECONDS_KEPT,
        num_workers=count,
    )
