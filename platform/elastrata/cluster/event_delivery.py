"""The delivery of events from many senders to one driver, each handled exactly once.

A sender numbers its events and keeps them until the driver has handled them. The buffer between the
two may be lost at any time, with all that lies in it: the senders send again what the driver lacks,
and what it has is known by its number. Nothing here knows Ray or a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastrata.core.events import ControlSignal, Event
from elastrata.core.record import StepRecord

MOST_IN_A_BUFFER = 10_000
"""Events of a sender that may lie in the buffer, some 10 MB: a driver may be stopped for long."""
MOST_KEPT = 50_000
"""Events that a sender keeps; beyond, the oldest step records are dropped."""


@dataclass(frozen=True)
class NumberedEvent:
    """One event."""

    sender: str
    number: int
    """The sender's events in their order are 0, 1, 2..."""
    event: Event


@dataclass(frozen=True)
class EventBatch:
    """All events that a sender has from one number on, as far as there is room for them."""

    sender: str
    first: int
    """That number. The buffer has all before it, or asks for what it lacks."""
    events: tuple[NumberedEvent, ...] = ()


@dataclass(frozen=True)
class Acknowledgement:
    """How one sender's events stand, and what is asked of the workers."""

    expected: int
    """The number of the event that the buffer takes next."""
    handled: int
    """All events below this number have been handled."""
    signal: ControlSignal | None = None


class EventBuffer:
    """Where events lie until the driver has handled them."""

    def __init__(self) -> None:
        self._events: list[NumberedEvent] = []
        self._expected: dict[str, int] = {}
        self._handled: dict[str, int] = {}

    def put(self, batch: EventBatch) -> tuple[list[Event], Acknowledgement]:
        """Takes what is new in a batch, unless something is missing before it.

        Returns:
            The events that were new, and the acknowledgement.
        """
        handled = self._handled.get(batch.sender, 0)
        expected = max(self._expected.get(batch.sender, 0), handled)
        complete = batch.events if batch.first <= expected else ()
        new = [numbered for numbered in complete if numbered.number >= expected]
        self._events += new
        expected = new[-1].number + 1 if new else expected
        self._expected[batch.sender] = expected
        return [numbered.event for numbered in new], Acknowledgement(expected, handled)

    def unhandled(self, handled: Mapping[str, int]) -> list[NumberedEvent]:
        """All events, in the order they came.

        Args:
            handled: by sender, below which number the driver has handled all; those events go.
        """
        self._handled.update(handled)
        self._events = list(unhandled(self._events, self._handled))
        return self._events


def unhandled(
    events: Iterable[NumberedEvent], handled: Mapping[str, int]
) -> Iterable[NumberedEvent]:
    """The events that are not below what was handled of their senders."""
    return (event for event in events if event.number >= handled.get(event.sender, 0))


def handled_after(events: Sequence[NumberedEvent]) -> dict[str, int]:
    """By sender, below which number all is handled when these events are."""
    return {event.sender: event.number + 1 for event in events}


class SendQueue:
    """A sender's events that the driver has not handled, in bounded memory.

    Args:
        sender: no other one has this name.
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._kept: deque[NumberedEvent] = deque()
        self._next = 0
        self._expected = 0
        self._handled = 0
        self.dropped = 0
        """Step records that were too many to keep; the history has them."""

    def add(self, event: Event) -> None:
        """Takes an event. Where there are too many, the oldest step record is dropped."""
        if len(self._kept) >= MOST_KEPT:
            self._drop()
        self._kept.append(NumberedEvent(self._sender, self._next, event))
        self._next += 1

    def batch(self) -> EventBatch:
        """The events that the buffer takes next."""
        end = self._handled + MOST_IN_A_BUFFER
        events = (event for event in self._kept if self._expected <= event.number < end)
        return EventBatch(self._sender, self._expected, tuple(events))

    def acknowledge(self, acknowledgement: Acknowledgement) -> None:
        """Goes by what the buffer says, which may be another one than before."""
        self._expected = acknowledgement.expected
        self._handled = max(self._handled, acknowledgement.handled)
        while self._kept and self._kept[0].number < self._handled:
            self._kept.popleft()

    @property
    def is_sent(self) -> bool:
        """Whether all lies in the buffer, as far as is known."""
        return self._expected >= self._next

    @property
    def is_handled(self) -> bool:
        """Whether nothing has to be kept."""
        return not self._kept

    def _drop(self) -> None:
        records = (i for i, kept in enumerate(self._kept) if isinstance(kept.event, StepRecord))
        del self._kept[next(records, 0)]
        self.dropped += 1
