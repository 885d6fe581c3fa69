"""The watchdogs: workers that take no more steps, and helpers that do not answer, are killed, so
that Ray replaces them. What is silent for too long is decided in `liveness.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Lock, Thread
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.cluster.liveness import (
    NO_ANSWER,
    Answer,
    HelperLiveness,
    Kill,
    Killed,
    Look,
    Ping,
    Replace,
    Report,
    Taken,
    WorkerLiveness,
)
from elastrata.cluster.processes import PROCESSES, state
from elastrata.core.events import Event, Lost

_LOOK_SECONDS = 0.5
_LONGEST_WAIT_FOR_A_KILL = 30.0


class Watchdog:
    """Watches the events of a run, in a thread of its own.

    Args:
        seconds: the longest time from one event to the next.
        report: called with what was found, after the workers' processes were killed.
    """

    def __init__(self, seconds: float, report: Callable[[Lost], None]) -> None:
        self._liveness = WorkerLiveness(seconds)
        self._report = report
        self._lock = Lock()
        self._closed = Flag()
        self._thread = Thread(target=self._watch, name="elastrata-watchdog", daemon=True)
        self._thread.start()

    def hear(self, events: Sequence[Event]) -> None:
        """Takes events as they come; called without any where it is certain that there were none,
        at least every two seconds."""
        self._feed(Taken(tuple(events)))

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self._feed(Look())

    def _feed(self, event: Taken | Look | Killed) -> None:
        with self._lock:
            instructions = self._liveness.handle(event, time.monotonic())
        for instruction in instructions:
            match instruction:
                case Kill():
                    self._feed(Killed(instruction, kill(instruction.pids)))
                case Report():
                    self._report(instruction.lost)


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
    states = dict.fromkeys(pids, NO_ANSWER)
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


class HelperWatchdog:
    """Asks helpers, again and again, whether they are there, in a thread of its own.

    Args:
        helpers: actors with a method `ping` that Ray starts again where they end, by name.
        seconds: how long one may take to answer.
        warn: called with a line for every helper that is replaced.
    """

    def __init__(
        self, helpers: Mapping[str, Any], seconds: float, warn: Callable[[str], None]
    ) -> None:
        self._helpers = [_Helper(name, actor, seconds) for name, actor in helpers.items()]
        self._warn = warn
        self._closed = Flag()
        self._thread = Thread(target=self._watch, name="elastrata-helpers", daemon=True)
        self._thread.start()

    @property
    def is_content(self) -> bool:
        """Whether every helper has answered since it was started."""
        return all(helper.liveness.is_there for helper in self._helpers)

    def close(self) -> None:
        """Asks no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            for helper in self._helpers:
                for line in helper.look():
                    self._warn(line)


class _Helper:
    def __init__(self, name: str, actor: Any, seconds: float) -> None:
        self.liveness = HelperLiveness(name, seconds)
        self._actor = actor
        self._ping: Any = None

    def look(self) -> list[str]:
        """Replaces it where it does not answer; returns a line that says so."""
        self._feed(Look())
        return self._feed(self._answer())

    def _feed(self, event: Look | Answer) -> list[str]:
        replaced = []
        for instruction in self.liveness.handle(event, time.monotonic()):
            match instruction:
                case Ping():
                    self._ping = self._actor.ping.remote()
                case Replace(line):
                    # Ray sends SIGKILL after 5 s, to stopped ones too.
                    ray.kill(self._actor, no_restart=False)
                    replaced.append(line)
        return replaced

    def _answer(self) -> Answer:
        if not ray.wait([self._ping], timeout=0)[0]:
            return Answer.NONE
        try:
            ray.get(self._ping)
        except ray.exceptions.RayError:
            return Answer.DIED
        return Answer.HERE
