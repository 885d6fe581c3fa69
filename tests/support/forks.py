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
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

MODULES = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers",
    "elastrata.cli.main",
    "elastrata.launch.launch",
    "elastrata.cluster.worker",
    "elastrata_workloads.bert.parallel",
    "elastrata_workloads.gpt.parallel",
)


@cache
def forks() -> ForkServerContext:
    """The ways of `multiprocessing` to start such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context


def fork(function: Callable[..., object], *args: Any) -> ForkServerProcess:
    """Starts a process that calls a function of a module, in the caller's environment."""
    process = forks().Process(target=_call, args=(dict(os.environ), function, args))
    process.start()
    return process


def _call(
    environment: Mapping[str, str], function: Callable[..., object], args: tuple[Any, ...]
) -> None:
    """Runs in the new process."""
    os.environ.clear()
    os.environ.update(environment)
    function(*args)
