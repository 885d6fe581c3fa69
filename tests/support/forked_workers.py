"""Ray's workers as forks of a process that has made their imports.

Six to ten processes work for the smallest run, and the imports of each take a core two to five
seconds: most of a test. A raylet of a session that began within `forked_workers` starts
`forked_worker.py` in place of each; that asks a server here for a fork. Tests that look for workers
among a raylet's children, or that kill them, have Ray's own way: `own_workers`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from support.forked_worker import SOCKET
from support.forks import fork, forks, take_environment

_PROGRAM = Path(__file__).with_name("forked_worker.py")
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Sessions of Ray that begin within this block have such workers, those of commands that are
    started in it, too; unless it lies in one of `own_workers`."""
    from ray._private.parameter import RayParams

    begin = RayParams.__init__

    def with_our_program(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **{"worker_path": str(_PROGRAM), **kwargs})

    with pytest.MonkeyPatch.context() as patch:
        if SOCKET not in os.environ:
            patch.setenv(SOCKET, _server())
        if os.environ[SOCKET]:
            patch.setattr(RayParams, "__init__", with_our_program)
        yield


@contextmanager
def own_workers() -> Iterator[None]:
    """Sessions of Ray that begin within this block start their workers as Ray does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET, "")
        yield


@cache
def _server() -> str:
    """Where the server of this process of tests listens."""
    folder = tempfile.mkdtemp(prefix="forks-")
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
    """Runs in the fork: Ray's own program of a worker."""
    import ray
    import torch

    os.setpgid(0, 0)  # a raylet ends the whole group of a worker that has gone
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    take_environment(asked["environment"])
    os.chdir(asked["cwd"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    program = str(Path(ray.__file__).parent / "_private" / "workers" / "default_worker.py")
    sys.argv = [program, *asked["argv"]]
    code = 1
    try:
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
