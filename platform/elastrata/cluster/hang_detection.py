"""Liveness: whether the workers of a run have been silent for too long.

Events go in, instructions come out. Nothing here knows Ray or reads a clock: `watchdog.py` feeds
it and carries out what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastrata.step.events import Event, Halted, Lost, Started

_LONGEST_LOOK_SECONDS = 2.0
"""Who looks more often than that and finds longer gaps was stopped itself, or starved."""
NO_ANSWER = "?"
"""The state of a process whose node does not answer."""
_STOPPED = "T"


class HeartbeatTimeout:
    """Counts the seconds without a sign of life. A clock that never goes back is passed in.

    What this process has slept through does not count: it would have heard nothing.

    Args:
        seconds: of silence, after which the time is over.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looked: float | None = None
        self.silent = 0.0
        """Seconds since the last sign."""

    def beat(self) -> None:
        """There was a sign of life."""
        self._looked, self.silent = None, 0.0

    def is_over(self, now: float) -> bool:
        """Called at every look, at least every two seconds."""
        if self._looked is not None:
            self.silent += min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        return self.silent > self._seconds


@dataclass(frozen=True)
class Look:
    """It is time to act, where there is cause."""


@dataclass(frozen=True)
class Taken:
    """The driver has taken these events of the workers; it is certain that there were no others."""

    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Kill:
    """Kills the processes of a group of workers; answered with `Killed`."""

    pids: Mapping[int, tuple[str, int]]
    """Node and process, by rank."""
    silent: float
    """Seconds without an event of theirs."""


@dataclass(frozen=True)
class Killed:
    """A `Kill` was carried out."""

    kill: Kill
    states: Mapping[int, str]
    """In which each rank's process was, in one letter as in /proc; or `NO_ANSWER`."""


@dataclass(frozen=True)
class Report:
    """Tells of a group of workers that was killed."""

    lost: Lost


class WorkerLiveness:
    """Whether a group of workers takes steps.

    A process that is stopped, or waits for ever in a collective, answers nobody; but it sends no
    events either. They are missed from the moment a group is ready to the moment it halts or is
    lost. Only what the driver was told counts: while nobody can hear of events, none are missed.

    Args:
        seconds: the longest time from one event to the next.
    """

    def __init__(self, seconds: float) -> None:
        self._timeout = HeartbeatTimeout(seconds)
        self._is_over = False
        self._pids: Mapping[int, tuple[str, int]] = {}

    def handle(self, event: Taken | Look | Killed, now: float) -> list[Kill | Report]:
        """Takes an event; `Taken` comes at least every two seconds.

        Args:
            event: what has happened.
            now: by a clock that never goes back, in seconds.

        Returns:
            What is to be done.
        """
        match event:
            case Taken(events):
                self._take(events, now)
            case Look() if self._is_over and self._pids:
                kill = Kill(self._pids, self._timeout.silent)
                self._pids = {}
                return [kill]
            case Killed(kill, states):
                if not self._pids:  # those whose node did not answer are tried again
                    self._pids = {r: p for r, p in kill.pids.items() if states[r] == NO_ANSWER}
                return [Report(_lost(states, kill.silent))]
        return []

    def _take(self, events: tuple[Event, ...], now: float) -> None:
        if events:
            self._timeout.beat()
        self._is_over = self._timeout.is_over(now)
        for event in events:
            if isinstance(event, Started):
                self._pids = event.pids
            elif isinstance(event, Halted | Lost):
                self._pids = {}


def _lost(states: Mapping[int, str], silent: float) -> Lost:
    stopped = tuple(sorted(rank for rank, state in states.items() if state == _STOPPED))
    why = f"; stopped: rank {', '.join(map(str, stopped))}" if stopped else ""
    return Lost(text=f"no sign of the workers for {silent:.0f} s: killed{why}", ranks=stopped)
