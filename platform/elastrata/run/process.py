"""A process of this machine, told apart from all others, those of the same id before it included.

Nothing heavy is imported here.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process, as long as its host runs and after."""

    boot_id: str
    """The host's boot id, new at every start."""
    pid_namespace: str
    """The namespace that `pid` counts in: containers of one host share its boot id, not its process
    ids."""
    pid: int
    start: int
    """Clock ticks from the host's start to that of the process: ids are given again."""

    def lives(self) -> bool | None:
        """Whether it exists; None where this process cannot see that."""
        if (self.boot_id, self.pid_namespace) != here():
            return None
        return lives(self.pid, self.start)


def this_process() -> Process | None:
    """The calling process; None where the system does not show what tells it apart."""
    (boot_id, pid_namespace), now = here(), stat(os.getpid())
    if boot_id is None or pid_namespace is None or now is None:
        return None
    return Process(boot_id, pid_namespace, os.getpid(), now[1])


def lives(pid: int, start: int | None) -> bool | None:
    """Whether the process of that id and start exists here; None where the system does not tell."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    now = stat(pid)
    return None if now is None else now[0] not in "ZX" and now[1] == start


def here() -> tuple[str | None, str | None]:
    """This host's boot id and this process's pid namespace, where the system shows them."""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return boot_id, str(Path("/proc/self/ns/pid").readlink())
    return None, None


def stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process, where the system shows them."""
    with suppress(OSError):
        # The name, in brackets, may hold anything, bytes that are no text included.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        return fields[0], int(fields[19])
    return None
