"""Processes forked from one that has imported what tests need.

The imports of a rank, or of a command, take a core four seconds; a fork of a process that has made
them takes none. Ray must not be running in the process that is forked, so it is a server: started
with the first fork, it ends with the process of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

MODULES = (
    "support.unseeded",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers",
    "ray._private.log_monitor",
    "ray._private.runtime_env.uv",
    "ray.autoscaler._private.monitor",
    "ray.dashboard.agent",
    "ray.dashboard.dashboard",
    "ray.dashboard.head",
    "ray.scripts.scripts",
    "elastrata.cli.main",
    "elastrata.driver.launch",
    "elastrata.cluster.worker",
    "elastrata_workloads.bert.parallel",
    "elastrata_workloads.unpadded.stack",
)

_FIRST_JOB = "01000000"
"""The id of a cluster's first job. A worker of Ray's has it, and its raylet's process, from its
environment, and reads that as early as it imports Ray; so these are those of every fork."""


@cache
def forks() -> ForkServerContext:
    """The ways of `multiprocessing` to start such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        patch.setenv("RAY_JOB_ID", _FIRST_JOB)
        patch.setenv("RAY_RAYLET_PID", str(os.getpid()))
        forkserver.ensure_running()
    return context


def fork(
    function: Callable[..., object],
    *args: Any,
    daemon: bool = False,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """Starts a process that calls a function of a module, by default in the caller's environment.

    A daemon ends with the process of the tests, which waits for any other.
    """
    call = (dict(os.environ if environment is None else environment), function, args)
    process = forks().Process(target=_call, args=call, daemon=daemon)
    process.start()
    return process


def _call(
    environment: Mapping[str, str], function: Callable[..., object], args: tuple[Any, ...]
) -> None:
    """Runs in the new process."""
    take_environment(environment)
    function(*args)


def take_environment(environment: Mapping[str, str]) -> None:
    """Gives a fork an environment, of which Ray has read its settings when it was imported."""
    from ray._raylet import Config

    os.environ.clear()
    os.environ.update(environment)
    Config.initialize("")
