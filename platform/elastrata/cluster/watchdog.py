"""The watchdog: kills workers that take no more steps, so that Ray replaces them.

`hang_detection.py` decides when the workers have been silent for too long.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event as Flag
from threading import Lock, Thread

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.cluster.hang_detection import (
    NO_ANSWER,
    EventsReceived,
    HangDetector,
    Kill,
    Killed,
    Report,
    TimeoutCheck,
)
from elastrata.cluster.processes import PROCESSES, state
from elastrata.step.events import Event, Lost

_LOOK_SECONDS = 0.5
_LONGEST_WAIT_FOR_A_KILL = 30.0


class Watchdog:
    """Watches the events of a run, in its own thread.

    Args:
        seconds: longest allowed time between two events.
        report: called with the loss, after the workers' processes were killed.
        traces: path of the workers' traces on their nodes, without the rank.
    """

    def __init__(self, seconds: float, report: Callable[[Lost], None], traces: str) -> None:
        self._traces = traces
        self._liveness = HangDetector(seconds)
        self._report = report
        self._lock = Lock()
        self._closed = Flag()
        self._thread = Thread(target=self._watch, name="elastrata-watchdog", daemon=True)
        self._thread.start()

    def receive(self, events: Sequence[Event]) -> None:
        """Take events as they arrive. Call it at least every two seconds, without events if there
        certainly were none."""
        self._feed(EventsReceived(tuple(events)))

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self._feed(TimeoutCheck())

    def _feed(self, event: EventsReceived | TimeoutCheck | Killed) -> None:
        with self._lock:
            instructions = self._liveness.handle(event, time.monotonic())
        for instruction in instructions:
            match instruction:
                case Kill():
                    self._feed(kill_group(instruction, self._traces))
                case Report():
                    self._report(instruction.lost)


def kill_group(kill: Kill, traces: str) -> Killed:
    """Kill processes on their nodes, stopped ones too.

    Args:
        kill: the processes.
        traces: path of the workers' traces on their nodes, without the rank.

    Returns:
        The state of each rank's process before, one letter as in /proc (T: stopped, X: gone); `?`
        if its node does not answer. The files that the ranks have written.
    """
    by_node: dict[str, dict[int, int]] = {}
    for rank, (node, pid) in kill.pids.items():
        by_node.setdefault(node, {})[rank] = pid
    # A node that is gone does not answer in time; its ranks keep this state.
    states, files = dict.fromkeys(kill.pids, NO_ANSWER), dict[int, str]()
    calls = [
        _kill_here.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(ranks, traces)
        for node, ranks in by_node.items()
    ]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=_LONGEST_WAIT_FOR_A_KILL)
    for reference in done:
        with suppress(ray.exceptions.RayError):
            states_there, files_there = ray.get(reference)
            states |= states_there
            files |= files_there
    return Killed(kill, states, files)


# Claims no CPU, as the workers may have claimed all.
@ray.remote(num_cpus=0, max_retries=0)
def _kill_here(pids: Mapping[int, int], traces: str) -> tuple[dict[int, str], dict[int, str]]:
    states = {rank: state(PROCESSES / str(pid)) for rank, pid in pids.items()}
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    files = {rank: f"{traces}{rank}" for rank in pids if Path(f"{traces}{rank}").exists()}
    return states, files
