"""Identification of a process on this machine, unambiguous even when process ids are reused.

This module imports nothing heavy.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """The identity of a process, unique across hosts and reboots."""

    boot_id: str
    """The host's boot id, new at every boot."""
    pid_namespace: str
    """The PID namespace of `pid`. Containers on one host share its boot id, but not its PIDs."""
    pid: int
    start: int
    """Clock ticks from the host's boot to the process's start."""

    def lives(self) -> bool | None:
        """Return whether the process exists; None if this process cannot see that."""
        # PIDs of another host, boot or container mean nothing here.
        if (self.boot_id, self.pid_namespace) != host_identity():
            return None
        return is_alive(self.pid, self.start)


def this_process() -> Process | None:
    """Return the calling process; None if the system cannot identify it unambiguously."""
    (boot_id, pid_namespace), status = host_identity(), process_state(os.getpid())
    if boot_id is None or pid_namespace is None or status is None:
        return None
    return Process(boot_id, pid_namespace, os.getpid(), status[1])


def is_alive(pid: int, start: int | None) -> bool | None:
    """Return whether a process with this PID and start exists here; None if unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process exists, but is another user's
    status = process_state(pid)
    # Zombies (Z) and dead processes (X) no longer run; another start time means that the PID was
    # reused.
    return None if status is None else status[0] not in "ZX" and status[1] == start


def host_identity() -> tuple[str | None, str | None]:
    """Return the host's boot id and this process's PID namespace, or None for both."""
    with suppress(OSError):
        # Linux only; other systems have no /proc.
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return boot_id, str(Path("/proc/self/ns/pid").readlink())
    return None, None


def process_state(pid: int) -> tuple[str, int] | None:
    """Return the state and start time of a process; None if the system does not reveal them."""
    with suppress(OSError):
        # The process name, in brackets, may contain brackets, spaces and bytes that are not text.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        # Fields 3 (state) and 22 (starttime) of proc(5).
        return fields[0], int(fields[19])
    return None
