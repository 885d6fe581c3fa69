"""The processes that a raylet has started on this machine, from Linux's `/proc`; empty
elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROCESSES = Path("/proc")


def children(parent: int) -> Iterator[Path]:
    """Yield the folders in `/proc` of a process's children."""
    if not PROCESSES.is_dir():
        return
    for process in PROCESSES.iterdir():
        with suppress(OSError, ValueError):
            if process.name.isdigit() and int(_status(process)[1]) == parent:
                yield process


def state(process: Path) -> str:
    """Return the state of a process, one letter as in /proc (T: stopped, X: gone)."""
    try:
        return _status(process)[0]
    except OSError:
        return "X"


def title(process: Path) -> str:
    """Return the title that a process gave itself; empty if it has ended."""
    with suppress(OSError):
        return (process / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    return ""


def environment(process: Path, *names: str) -> dict[str, str]:
    """Return those of these variables that a process was started with."""
    with suppress(OSError):
        entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
        pairs = (entry.partition("=") for entry in entries)
        return {name: value for name, _, value in pairs if name in names}
    return {}


def _status(process: Path) -> list[str]:
    # The name, in brackets, may contain spaces, brackets and undecodable bytes.
    return (process / "stat").read_bytes().rpartition(b")")[2].decode().split()
