"""The reaper: a process of the run that was stopped by a signal is killed, so that it is missed.

Ray notices that a process has ended, but not that it was stopped: who waits for it waits for ever.
So it is with the helpers that Ray starts: the controller, those who hand out the data, spares.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread

from elastrata.cluster.liveness import HeartbeatTimeout
from elastrata.cluster.processes import children, environment, state, title

_LOOKS = 10
"""In the time after which a process is killed."""
_LOOK_SECONDS = (0.2, 1.0)
_STOPPED = "T"


class StoppedProcesses:
    """How long which processes have been stopped; the clock is passed in.

    Args:
        seconds: after which one has been stopped for too long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopped: dict[int, HeartbeatTimeout] = {}

    def overdue(self, stopped: Iterable[int], now: float) -> dict[int, float]:
        """Those that have been stopped for too long, with for how long.

        Args:
            stopped: the pids of all that are stopped now.
            now: by a clock that never goes back.
        """
        before = self._stopped
        self._stopped = {pid: before.get(pid) or HeartbeatTimeout(self._seconds) for pid in stopped}
        return {pid: t.silent for pid, t in self._stopped.items() if t.is_over(now)}


class Reaper:
    """Watches the processes of one job on this machine, in a thread of its own.

    Args:
        raylet: gives the pid of the raylet that has started them; called once, in the thread.
        job: id of the job.
        seconds: how long a process may be stopped.
        warn: called with a line for every process that was killed.
    """

    def __init__(
        self, raylet: Callable[[], int], job: str, seconds: float, warn: Callable[[str], None]
    ) -> None:
        self._raylet, self._job, self._warn = raylet, job, warn
        self._stops = StoppedProcesses(seconds)
        least, most = _LOOK_SECONDS
        self._look_seconds = min(max(seconds / _LOOKS, least), most)
        self._closed = Flag()
        self._thread = Thread(target=self._watch, name="elastrata-reaper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _watch(self) -> None:
        raylet = self._raylet()
        while not self._closed.wait(self._look_seconds):
            stopped = {int(process.name): process for process in self._stopped(raylet)}
            for pid, seconds in self._stops.overdue(stopped, time.monotonic()).items():
                name = title(stopped[pid])
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._warn(f"{name} had been stopped by a signal for {seconds:.0f} s: killed")

    def _stopped(self, raylet: int) -> list[Path]:
        return [p for p in children(raylet) if state(p) == _STOPPED and self._is_ours(p)]

    def _is_ours(self, process: Path) -> bool:
        return environment(process, "RAY_JOB_ID").get("RAY_JOB_ID") == self._job
