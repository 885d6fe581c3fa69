"""What a test left behind: the Rays of commands that were killed, and Ray's processes at large."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from elastrata.cluster.ray_processes import Session, dead_sessions
from support.command import kill_started, wait_until
from support.marks import marked

_RAY = (b"ray::", b"/ray/core/", b"/ray/_private/", b"/ray/dashboard/", b"/ray/autoscaler/")
_SECONDS_TO_GO = 200.0
"""For the Ray of a driver that was killed; its guardian takes 3 s where the machine is idle."""


def end_commands() -> None:
    """Kills the commands that still run. The Rays that they started for themselves must go by
    themselves."""
    commands = kill_started()
    if not commands:
        return
    drivers = {command.pid for command in commands}
    killed = {command.pid for command in commands if (command.returncode or 0) < 0}
    try:
        wait_until(lambda: not any(_dead(drivers).values()), _SECONDS_TO_GO, "the sessions' ends")
    finally:
        for session in _dead(drivers):
            session.end()
        for session in _dead(killed):  # the logs of one that failed by itself are of use
            session.remove()


def kill_ray(test: str) -> None:
    """SIGKILL to what is left of the clusters that a test started without a command."""
    for pid in marked(test):
        with suppress(OSError):
            if any(part in Path(f"/proc/{pid}/cmdline").read_bytes() for part in _RAY):
                os.kill(pid, signal.SIGKILL)


def _dead(drivers: set[int]) -> dict[Session, list[int]]:
    return {s: pids for s, pids in dead_sessions().items() if s.driver and s.driver.pid in drivers}
