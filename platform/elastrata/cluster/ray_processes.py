"""The processes of a Ray that a driver started for itself: found by a mark that all of them carry.

Ray's own list knows the five that the driver started, but not their children, and dies with the
driver. So the driver, its identity and the folder of its Ray are put into the environment that the
five are started with. Every process below inherits that, whoever its parent is by then, whatever
its title says, and an id that is given to another process later does not carry it. Two agents lose
a part of their environment to their titles: they are known by the session's logs, which they have
open.

Linux ends the processes that the driver itself started at its death; it does not end their
children, nor is one that is stopped, or hangs, heard of again. So a session has a guardian, a small
process that ends what a dead driver leaves. It notices the death by a pipe that only the driver
holds, and by having another parent. It is in a session of its own, so that neither Ctrl-C nor the
kill of a process group reaches it; where it is killed as well, the next command of the same run
does its work, or `elastrata doctor --clean`. Nothing heavy is imported here: it starts at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from select import select

from elastrata.run.process import Process, this_process

MARK = "ELASTRATA_RAY"
"""The variable of the environment."""
NICENESS = "RAY_worker_niceness"
"""The variable of the environment by which Ray's processes take the nice value of their workers."""
_PREFIX = "ray-"
_NOTE = "elastrata-driver"
"""The file in the session's folder with the same as the mark."""
_NOTE_BYTES = 4096
_TITLE = b"ray::"
"""How the titles of Ray's workers and agents begin."""
_MEMORY = Path("/dev/shm")
_SECONDS_TO_END = 2.0
"""Between SIGTERM and SIGKILL."""
_MOST_SECONDS = 10.0
_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_BETWEEN_GUARDS_LOOKS = 1.0


@dataclass(frozen=True)
class Session:
    """A Ray of one node, its driver, and where it keeps its files."""

    driver: Process | None
    """None where the system does not show what tells processes apart: then none is found."""
    folder: Path

    @property
    def memory(self) -> Path:
        """For files that are to outlive their process but not the machine; made by who needs it."""
        return _MEMORY / self.folder.name

    @property
    def mark(self) -> str:
        """The value of the variable `MARK`; empty where there is none."""
        if self.driver is None:
            return ""
        host = f"{self.driver.boot_id} {self.driver.pid_namespace}"
        return f"{host} {self.driver.pid} {self.driver.start} {self.folder}"

    def processes(self) -> list[int]:
        """The ids of those that are there now."""
        return [pid for pid, session in _marked() if session == self]

    def end(self) -> int:
        """Ends its processes, those that are stopped too; returns how many there were.

        Only those with such a mark, which is looked at again each time: no other is ever hit.
        """
        asked: set[int] = set()
        began = time.monotonic()
        while (left := self.processes()) and time.monotonic() - began < _MOST_SECONDS:
            is_late = time.monotonic() - began > _SECONDS_TO_END
            for pid in left:
                if is_late or pid not in asked:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            asked.update(left)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return len(asked)

    def remove(self, *, logs: bool = True) -> None:
        """Deletes its files.

        Args:
            logs: whether the folder with Ray's logs goes, too.
        """
        shutil.rmtree(self.memory, ignore_errors=True)
        if logs:
            shutil.rmtree(self.folder, ignore_errors=True)


def new_session() -> Session:
    """A session of this process, with a folder of its own for sockets and logs."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_folders()))
    session = Session(this_process(), folder)
    (folder / _NOTE).write_text(session.mark, encoding="utf-8")
    return session


def read_mark(text: str) -> Session | None:
    """The session whose mark that is; None where it is none."""
    try:
        boot_id, pid_namespace, pid, start, folder = text.split(" ", 4)
        return Session(Process(boot_id, pid_namespace, int(pid), int(start)), Path(folder))
    except ValueError:
        return None


def dead_sessions() -> dict[Session, list[int]]:
    """This user's sessions on this machine whose driver is gone, with their processes.

    Sessions of other hosts and containers are none of them: their drivers cannot be seen.
    """
    sessions: dict[Session, list[int]] = {session: [] for session in _noted()}
    for pid, session in _marked():
        sessions.setdefault(session, []).append(pid)
    return {
        session: pids
        for session, pids in sessions.items()
        if session.driver and session.driver.lives() is False
    }


def clear_away(driver: Process | None, warn: Callable[[str], None]) -> None:
    """Ends the Ray that a driver of this machine has left, where that driver is dead.

    Args:
        driver: None: one that cannot be told apart, which leaves nothing that can be found.
        warn: called with one line where anything was there.
    """
    if driver is None:
        return
    left = [session for session in dead_sessions() if session.driver == driver]
    count = sum(session.end() for session in left)
    for session in left:
        session.remove()
    if count:
        warn(f"ended {count} processes of Ray's that process {driver.pid} left behind")


def _marked() -> Iterator[tuple[int, Session]]:
    """This user's processes of such sessions."""
    for process in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.getuid():
                session = _by_mark(process) or _by_files(process)
                if session:
                    yield int(process.name), session


def _by_mark(process: Path) -> Session | None:
    name = f"{MARK}=".encode()
    for variable in (process / "environ").read_bytes().split(b"\0"):
        if variable.startswith(name):
            return read_mark(os.fsdecode(variable.removeprefix(name)))
    return None


def _by_files(process: Path) -> Session | None:
    """By a log that is open: Ray's agents write their titles over a part of their environment."""
    if (process / "cmdline").read_bytes().startswith(_TITLE):
        start = f"{_folders()}/{_PREFIX}"
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                file = link.readlink()
                if str(file).startswith(start):
                    return _of_folder(Path(_folders(), file.relative_to(_folders()).parts[0]))
    return None


def _noted() -> Iterator[Session]:
    """The sessions whose folders are there."""
    for note in Path(_folders()).glob(f"{_PREFIX}*/{_NOTE}"):
        if session := _of_folder(note.parent):
            yield session


def _of_folder(folder: Path) -> Session | None:
    """The session of a folder; None where it is none of this user's."""
    note = folder / _NOTE
    with suppress(OSError):
        if note.is_file() and folder.stat().st_uid == os.getuid():
            with note.open("rb") as stream:
                session = read_mark(os.fsdecode(stream.read(_NOTE_BYTES)))
            return session if session and session.folder == folder else None
    return None


def _folders() -> str:
    # Sockets lie below, and their paths may have 107 characters at most.
    return "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()


@contextmanager
def guarded(session: Session) -> Iterator[None]:
    """Runs its block with a guardian, which ends the session where this process dies meanwhile."""
    if session.driver is None:
        yield
        return
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, session.mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    try:
        yield
    finally:
        guardian.kill()
        guardian.communicate()


def guard(mark: str) -> None:
    """Ends the session of that mark when its driver dies. The logs stay, for whoever wants to know
    of what it died."""
    session = read_mark(mark)
    if session is None or session.driver is None:
        return
    while os.getppid() == session.driver.pid:
        if select([0], [], [], _SECONDS_BETWEEN_GUARDS_LOOKS)[0] and not os.read(0, 1):
            break
    session.end()
    session.remove(logs=False)


if __name__ == "__main__":
    guard(sys.argv[1])
