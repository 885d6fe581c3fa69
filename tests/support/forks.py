"""Processes forked from one that has imported what tests need.

The imports of a rank, or of a command, take a core four seconds; a fork of a process that has made
them takes none. Ray must not be running in the process that is forked, so it is a server: started
with the first fork, it ends with the process of the tests.
"""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing.context import ForkServerContext

MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers",
    "elastrata.cli",
    "elastrata.launch.launch",
    "elastrata.workers.worker",
    "elastrata_workloads.bert.parallel",
    "elastrata_workloads.gpt.parallel",
)


@cache
def forks() -> ForkServerContext:
    """The ways of `multiprocessing` to start such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context
