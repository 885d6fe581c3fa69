"""The watchdog: a group of workers that takes no more steps is killed, so that Ray replaces it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Lock, Thread

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.cluster.patience import Patience
from elastrata.cluster.processes import PROCESSES, state
from elastrata.core.events import Event, Halted, Lost, Started

_LOOK_SECONDS = 0.5
_LONGEST_WAIT_FOR_A_KILL = 30.0


class Watchdog:
    """Watches the events of a run, in a thread of its own.

    A process that is stopped, or waits for ever in a collective, answers nobody; but it sends no
    events either. It is awake from the moment a group is ready to the moment it halts or is lost.
    Only what it was told counts: while nobody can hear of events, they are not missed.

    Args:
        seconds: the longest time from one event to the next.
        bark: called with what was found, after the workers' processes were killed.
    """

    def __init__(self, seconds: float, bark: Callable[[Lost], None]) -> None:
        self._patience = Patience(seconds)
        self._is_over = False
        self._bark = bark
        self._lock = Lock()
        self._pids: Mapping[int, tuple[str, int]] = {}
        self._closed = Flag()
        self._thread = Thread(target=self._watch, name="elastrata-watchdog", daemon=True)
        self._thread.start()

    def hear(self, events: Sequence[Event]) -> None:
        """Takes events as they come; called without any where it is certain that there were none,
        at least every two seconds."""
        with self._lock:
            if events:
                self._patience.heard()
            self._is_over = self._patience.is_over(time.monotonic())
            for event in events:
                if isinstance(event, Started):
                    self._pids = event.pids
                elif isinstance(event, Halted | Lost):
                    self._pids = {}

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with self._lock:
                pids = self._pids if self._is_over else {}
                silent = self._patience.silent
                if pids:
                    self._pids = {}
            if pids:
                states = kill(pids)
                self._bark(_report(states, silent))
                with self._lock:
                    if not self._pids:  # those whose node did not answer are tried again
                        self._pids = {r: p for r, p in pids.items() if states[r] == "?"}


def kill(pids: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Kills processes on their nodes, those that are stopped too.

    Args:
        pids: node id and process id by rank.

    Returns:
        The state each rank's process was in, in one letter as in /proc (T: stopped, X: gone); `?`
        where its node does not answer.
    """
    by_node: dict[str, dict[int, int]] = {}
    for rank, (node, pid) in pids.items():
        by_node.setdefault(node, {})[rank] = pid
    states = dict.fromkeys(pids, "?")
    started = [
        _kill_here.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(ranks)
        for node, ranks in by_node.items()
    ]
    done, _ = ray.wait(started, num_returns=len(started), timeout=_LONGEST_WAIT_FOR_A_KILL)
    for reference in done:
        with suppress(ray.exceptions.RayError):
            states |= ray.get(reference)
    return states


@ray.remote(num_cpus=0, max_retries=0)
def _kill_here(pids: Mapping[int, int]) -> dict[int, str]:
    states = {rank: state(PROCESSES / str(pid)) for rank, pid in pids.items()}
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return states


def _report(states: Mapping[int, str], silent: float) -> Lost:
    stopped = tuple(sorted(rank for rank, letter in states.items() if letter == "T"))
    why = f"; stopped: rank {', '.join(map(str, stopped))}" if stopped else ""
    return Lost(text=f"no sign of the workers for {silent:.0f} s: killed{why}", ranks=stopped)
