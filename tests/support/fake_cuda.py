"""Calls a function on fake CUDA, in a process of its own: there the engine runs as on GPUs.

The processes are forked from one that has loaded the shim before torch, which no process of the
tests itself has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

import pytest

_MODULES = (
    "elastrata.rehearsal.rehearse",
    "elastrata_workloads.bert.parallel",
    "elastrata_workloads.unpadded.stack",
    "torch.distributed.pipelining",
)
"""Forks have made these imports, which take a core seconds."""


HAS_COMPILER = any(map(shutil.which, ("g++", "clang++")))
NEEDS_COMPILER = pytest.mark.skipif(
    not HAS_COMPILER, reason="rehearsals and torch.compile need a C++ compiler: g++ or clang++"
)


def on_fake_cuda(
    function: Callable[..., Any], *args: Any, world_size: int | None = 8, rank: int = 0
) -> Any:
    """`function(ledger, *args)` within `rehearsal(world_size=world_size, rank=rank)`.

    Args:
        function: of a module that other processes can import, such as one of `support`.
        args: like its result, with no fake tensors in them.
        world_size: ranks of the default process group; None: it is not there.
        rank: the one that is played.
    """
    return apart(_in_session, function, args, world_size, rank)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in such a process, where it can begin rehearsals."""
    if not HAS_COMPILER:
        pytest.skip("rehearsals need a C++ compiler: g++ or clang++")
    server = _server()
    server.send((function, args))
    done, value = server.recv()
    if not done:
        pytest.fail(value, pytrace=False)
    return value


@cache
def _server() -> Connection:
    """Ends with the process of the tests: its end of the socket is then closed."""
    ours, theirs = socketpair()
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "support.fake_cuda", str(theirs.fileno())]
    subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, pass_fds=[theirs.fileno()]
    ).returncode = 0  # else Python warns that it was not waited for
    theirs.close()
    return Connection(ours.detach())


def _serve(tests: Connection) -> None:
    """Forks for every request."""
    from elastrata.rehearsal.process import load_shim

    load_shim()
    for module in _MODULES:
        import_module(module)

    while True:
        try:
            request = tests.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            tests.send(_answer(*request))
            os._exit(0)
        if code := os.waitpid(child, 0)[1]:
            tests.send((False, f"the process on fake CUDA ended with {code}"))


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*args)
    except BaseException:
        return False, traceback.format_exc()


def _in_session(
    function: Callable[..., Any], args: tuple[Any, ...], world_size: int | None, rank: int
) -> Any:
    from elastrata.rehearsal.session import rehearsal

    with rehearsal(world_size=world_size, rank=rank) as ledger:
        return function(ledger, *args)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
