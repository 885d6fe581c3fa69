"""Hang detection: decides when the workers of a run have been silent for too long.

Events go in, instructions come out. This module does not import Ray and reads no clock:
`watchdog.py` feeds it and carries out its instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastrata.step.events import Event, Halted, Lost, Started

# A process that checks more often than that and finds a longer gap was itself suspended or starved.
_LONGEST_LOOK_SECONDS = 2.0
"""Most seconds of silence that one check adds."""
NO_ANSWER = "?"
"""The state of a process whose node does not answer."""
_STOPPED = "T"


class HeartbeatTimeout:
    """Timeout on the seconds without an event. A monotonic clock is passed in.

    Time that this process was suspended does not count, as it could not have received an event.

    Args:
        seconds: longest allowed silence.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._checked_at: float | None = None
        self.silent = 0.0
        """Seconds since the last event."""

    def beat(self) -> None:
        """Reset the timeout: an event has arrived."""
        self._checked_at, self.silent = None, 0.0

    def is_over(self, now: float) -> bool:
        """Return True if the silence was too long. Call it at least every two seconds."""
        if self._checked_at is not None:
            self.silent += min(now - self._checked_at, _LONGEST_LOOK_SECONDS)
        self._checked_at = now
        return self.silent > self._seconds


@dataclass(frozen=True)
class TimeoutCheck:
    """Time to act on an expired timeout."""


@dataclass(frozen=True)
class EventsReceived:
    """The driver has received these events of the workers, and certainly no others."""

    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Kill:
    """An instruction to kill the processes of a group of workers; answered with `Killed`."""

    pids: Mapping[int, tuple[str, int]]
    """Node id and process id by rank."""
    silent: float
    """Seconds without an event of the group."""


@dataclass(frozen=True)
class Killed:
    """A `Kill` was carried out."""

    kill: Kill
    states: Mapping[int, str]
    """State of each rank's process when it was killed, one letter as in /proc; or `NO_ANSWER`."""
    traces: Mapping[int, str] = field(default_factory=dict)
    """File with the last collectives of each rank that has written one, on its node."""


@dataclass(frozen=True)
class Report:
    """An instruction to report that a group of workers was killed."""

    lost: Lost


# A process that is stopped, or waits for ever in a collective, does not answer questions; but it
# sends no events either, so silence is the sign.
class HangDetector:
    """State machine that decides whether a group of workers hangs.

    Events are expected from the start of a group until it halts or is lost. Only events that the
    driver received count: while the driver can receive none, no timeout runs.

    Args:
        seconds: longest allowed time between two events.
    """

    def __init__(self, seconds: float) -> None:
        self._timeout = HeartbeatTimeout(seconds)
        self._is_over = False
        self._pids: Mapping[int, tuple[str, int]] = {}

    def handle(
        self, event: EventsReceived | TimeoutCheck | Killed, now: float
    ) -> list[Kill | Report]:
        """Take an event and return instructions. `Taken` comes at least every two seconds.

        Args:
            event: the event.
            now: time of a monotonic clock, in seconds.
        """
        match event:
            case EventsReceived(events):
                self._take(events, now)
            case TimeoutCheck() if self._is_over and self._pids:
                kill = Kill(self._pids, self._timeout.silent)
                self._pids = {}
                return [kill]
            case Killed(kill, states, traces):
                if not self._pids:  # try again those whose node did not answer
                    self._pids = {r: p for r, p in kill.pids.items() if states[r] == NO_ANSWER}
                return [Report(_to_lost(states, traces, kill.silent))]
        return []

    def _take(self, events: tuple[Event, ...], now: float) -> None:
        if events:
            self._timeout.beat()
        # Decided here, when it is certain which events arrived, and acted on at the next `Look`.
        self._is_over = self._timeout.is_over(now)
        for event in events:
            if isinstance(event, Started):
                self._pids = event.pids
            elif isinstance(event, Halted | Lost):
                self._pids = {}


def _to_lost(states: Mapping[int, str], traces: Mapping[int, str], silent: float) -> Lost:
    stopped = tuple(sorted(rank for rank, state in states.items() if state == _STOPPED))
    why = f"; stopped: rank {', '.join(map(str, stopped))}" if stopped else ""
    if traces:
        rank, file = min(traces.items())
        more = f" and {len(traces) - 1} more" if len(traces) > 1 else ""
        why += f"; last collectives: {file} on the node of rank {rank}{more}"
    return Lost(text=f"no progress by the workers for {silent:.0f} s: killed{why}", ranks=stopped)
