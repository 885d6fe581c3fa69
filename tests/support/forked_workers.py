"""Ray's Python processes as forks of a process that has made their imports.

Six to ten workers and five of Ray's own processes serve the smallest run, and the imports of each
take a core one to five seconds: most of a test. In a session that began within `forked_workers`,
`forked_worker.py` is started in place of each; that asks a server here for a fork. Tests that look
for workers among a raylet's children, or that kill them, have Ray's own workers: `own_workers`.
A fork is killed with the program in whose place it runs, though it be stopped: a test of what
outlives its parent has Ray's own programs, too: `own_programs`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from support.forked_worker import SOCKET
from support.forks import fork, forks, take_environment

_PROGRAM = str(Path(__file__).with_name("forked_worker.py"))
_OWN_WORKERS = "ELASTRATA_TEST_OWN_WORKERS"
"""The variable by which workers are not forked."""
_OWN_PROGRAMS = "ELASTRATA_TEST_OWN_PROGRAMS"
"""The variable by which the others are not."""
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl."""


@contextmanager
def forked_workers() -> Iterator[dict[str, str]]:
    """Sessions of Ray that begin within this block have such processes, those of commands that are
    started in it, too; but for the workers, where it lies in one of `own_workers`. It gives the
    variables of the environment by which commands know."""
    if has_own_processes():
        yield {}
        return
    with pytest.MonkeyPatch.context() as patch:
        if SOCKET not in os.environ:
            patch.setenv(SOCKET, _server())
        if _OWN_PROGRAMS not in os.environ:
            _fork_programs(patch)
        if _OWN_WORKERS not in os.environ:
            _fork_workers(patch)
        told = (SOCKET, _OWN_WORKERS, _OWN_PROGRAMS)
        yield {name: os.environ[name] for name in told if name in os.environ}


def _fork_workers(patch: pytest.MonkeyPatch) -> None:
    from ray._private.parameter import RayParams

    begin, ours = RayParams.__init__, dict.fromkeys(("worker_path", "setup_worker_path"), _PROGRAM)

    def with_our_program(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **(ours | kwargs))

    patch.setattr(RayParams, "__init__", with_our_program)


def _fork_programs(patch: pytest.MonkeyPatch) -> None:
    """Those that are neither workers nor binaries: agents, monitors, the dashboard."""
    from ray._private import services

    start, python = services.start_ray_process, [sys.executable, "-u"]

    def start_fork(command: list[str], *args: Any, **kwargs: Any) -> Any:
        if command[:2] == python and command[2] != _PROGRAM:
            command = [sys.executable, _PROGRAM, *command[2:]]
        return start(command, *args, **kwargs)

    def fork_agent(component: str, session_dir: str, unbuffered: bool = True) -> list[str]:
        return [sys.executable, _PROGRAM]

    patch.setattr(services, "start_ray_process", start_fork)
    patch.setattr(services, "_build_python_executable_command_memory_profileable", fork_agent)


@contextmanager
def own_workers() -> Iterator[None]:
    """Sessions of Ray that begin within this block start their workers as Ray does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_OWN_WORKERS, "yes")
        yield


@contextmanager
def own_programs() -> Iterator[None]:
    """Sessions of Ray that begin within this block start everything else as Ray does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_OWN_PROGRAMS, "yes")
        yield


@contextmanager
def own_processes() -> Iterator[None]:
    """Run the block as a user's machine would: every process of Ray, and every command, is a new
    program, not a fork."""
    with own_workers(), own_programs():
        yield


def has_own_processes() -> bool:
    """Return whether `own_processes` is in effect."""
    return _OWN_WORKERS in os.environ and _OWN_PROGRAMS in os.environ


@cache
def _server() -> str:
    """Where the server of this process of tests listens."""
    folder = tempfile.mkdtemp(prefix="forks-", dir="/tmp")  # sockets need short paths
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = str(Path(folder) / "socket")
    reading, writing = forks().Pipe(duplex=False)
    fork(_serve, path, writing, daemon=True)
    reading.recv()
    return path


def _serve(path: str, ready: Connection) -> None:
    """Forks for whoever asks, until its own parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        ready.send(None)
        ready.close()
        selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listening:
                    _accept(listening, selector)
                else:
                    _end(key, selector)


def _accept(listening: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listening.accept()
    header, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        asked = json.loads(stream.read(int.from_bytes(header, "big")))
    pid = os.fork()
    if not pid:
        for key in list(selector.get_map().values()):
            os.close(key.fd)
        connection.close()
        _become(asked, streams)
    for number in streams:
        os.close(number)
    watched = os.pidfd_open(pid)
    selector.register(watched, selectors.EVENT_READ, (pid, connection, watched))
    selector.register(connection, selectors.EVENT_READ, (pid, connection, watched))


def _end(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """The fork has ended, or the one who asked for it has."""
    pid, connection, watched = key.data
    if connection.fileno() < 0:  # both at once
        return
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    selector.unregister(watched)
    selector.unregister(connection)
    os.close(watched)
    connection.close()


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Runs in the fork: one of Ray's programs, that of a worker where none is named."""
    import ray
    import torch

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.setpgid(0, 0)  # a raylet ends the whole group of a worker that has gone
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    take_environment(asked["environment"])
    os.chdir(asked["cwd"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.argv = asked["argv"]
    nodes = ExitStack()
    if sys.argv[0].startswith("-"):
        worker = Path(ray.__file__).parent / "_private" / "workers" / "default_worker.py"
        sys.argv.insert(0, str(worker))
    else:  # agents take their raylet for dead when it is not their parent
        os.environ["RAY_RAYLET_PID"] = str(os.getppid())
        nodes.enter_context(forked_workers())  # those that an autoscaler starts
    code = 1
    try:
        with nodes:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
