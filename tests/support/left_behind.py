"""What a test left behind: the Rays of commands that were killed, and Ray's processes at large."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from support.command import kill_started, wait_until
from support.marks import OURS, marked

_RAY = (b"ray::", b"/ray/core/", b"/ray/_private/", b"/ray/dashboard/", b"/ray/autoscaler/")
_SECONDS_TO_GO = 200.0
"""For the Ray of a driver that was killed; it takes 3 s if the machine is idle."""


def end_commands() -> None:
    """Kill the commands that still run. The Rays that they started must end by themselves."""
    commands = kill_started()
    if any((command.returncode or 0) < 0 for command in commands):
        wait_until(lambda: not orphans(OURS), _SECONDS_TO_GO, "the ends of their Rays")


def kill_ray(test: str) -> None:
    """SIGKILL to what is left of the clusters that a test started without a command."""
    for pid in _of_ray(test):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def orphans(mark: str) -> list[int]:
    """Return Ray's processes with such a mark whose parent has died."""
    found = []
    for pid in _of_ray(mark):
        with suppress(OSError):
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            if status.rpartition(")")[2].split()[1] == "1":
                found.append(pid)
    return found


def _of_ray(mark: str) -> list[int]:
    found = []
    for pid in marked(mark):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(part in command for part in _RAY):
                found.append(pid)
    return found
