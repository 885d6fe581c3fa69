"""A rank that waits for another one in a collective, and writes what it waits for."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastrata.cluster.hang_trace import HangTrace, set_group_timeouts
from support.command import wait_until

WAITED_FOR = 7
"""Numbers in the message."""


def wait_for_a_peer(rank: int, world_size: int, prefix: str) -> Any:
    """On rank 0: the newest collective in its trace, and the time-outs of its groups."""
    axis = dist.new_group(range(world_size))
    set_group_timeouts(3000)
    if rank:
        # The file is what ends the other rank's wait.
        wait_until(Path(f"{prefix}0").exists, 60, "the trace of rank 0")
    waiting: Any = dist.all_reduce(torch.ones(WAITED_FOR), group=axis, async_op=True)
    if rank:
        waiting.wait()
        return None
    trace = HangTrace(prefix, rank, 0.2)
    waiting.wait()
    trace.close()
    entries = pickle.loads(Path(f"{prefix}0").read_bytes())["entries"]
    timeouts = [_timeout(group) for group in (dist.group.WORLD, axis)]
    return entries[-1], timeouts


def _timeout(group: Any) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout
