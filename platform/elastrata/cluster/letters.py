"""Letters: events on their way from many senders to one driver, each handled exactly once.

A sender numbers its events and keeps them until the driver has handled them. The shelf between the
two may be lost at any time, with all that lies on it: the senders send again what the driver lacks,
and what it has is known by its number. Nothing here knows Ray or a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastrata.core.control_signal import ControlSignal
from elastrata.core.events import Event
from elastrata.core.record import StepRecord

MOST_ON_THE_SHELF = 10_000
"""Events of a sender that may lie on the shelf, some 10 MB: a driver may be stopped for long."""
MOST_KEPT = 50_000
"""Events that a sender keeps; beyond, the oldest step records are dropped."""


@dataclass(frozen=True)
class Letter:
    """One event."""

    sender: str
    number: int
    """The sender's events in their order are 0, 1, 2..."""
    event: Event


@dataclass(frozen=True)
class Parcel:
    """All letters that a sender has from one number on, as far as there is room for them."""

    sender: str
    first: int
    """That number. What lies before it the shelf has, or lacks and is to ask for."""
    letters: tuple[Letter, ...] = ()


@dataclass(frozen=True)
class Receipt:
    """How one sender's events stand, and what is asked of the workers."""

    expected: int
    """The number of the event that the shelf takes next."""
    handled: int
    """All events below this number have been handled."""
    request: ControlSignal | None = None


class Shelf:
    """Where letters lie until the driver has handled them."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._expected: dict[str, int] = {}
        self._handled: dict[str, int] = {}

    def put(self, parcel: Parcel) -> tuple[list[Event], Receipt]:
        """Takes what is new in a parcel, unless something is missing before it.

        Returns:
            The events that were new, and the receipt.
        """
        handled = self._handled.get(parcel.sender, 0)
        expected = max(self._expected.get(parcel.sender, 0), handled)
        complete = parcel.letters if parcel.first <= expected else ()
        new = [letter for letter in complete if letter.number >= expected]
        self._letters += new
        expected = new[-1].number + 1 if new else expected
        self._expected[parcel.sender] = expected
        return [letter.event for letter in new], Receipt(expected, handled)

    def unhandled(self, handled: Mapping[str, int]) -> list[Letter]:
        """All letters, in the order they came.

        Args:
            handled: by sender, below which number the driver has handled all; those letters go.
        """
        self._handled.update(handled)
        self._letters = list(unhandled(self._letters, self._handled))
        return self._letters


def unhandled(letters: Iterable[Letter], handled: Mapping[str, int]) -> Iterable[Letter]:
    """The letters that are not below what was handled of their senders."""
    return (one for one in letters if one.number >= handled.get(one.sender, 0))


def handled_after(letters: Sequence[Letter]) -> dict[str, int]:
    """By sender, below which number all is handled when these letters are."""
    return {letter.sender: letter.number + 1 for letter in letters}


class Outgoing:
    """A sender's events that the driver has not handled, in bounded memory.

    Args:
        sender: no other one has this name.
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._kept: deque[Letter] = deque()
        self._next = 0
        self._expected = 0
        self._handled = 0
        self.dropped = 0
        """Step records that were too many to keep; the history has them."""

    def add(self, event: Event) -> None:
        """Takes an event. Where there are too many, the oldest step record is dropped."""
        if len(self._kept) >= MOST_KEPT:
            self._drop()
        self._kept.append(Letter(self._sender, self._next, event))
        self._next += 1

    def parcel(self) -> Parcel:
        """What the shelf takes next."""
        end = self._handled + MOST_ON_THE_SHELF
        letters = (one for one in self._kept if self._expected <= one.number < end)
        return Parcel(self._sender, self._expected, tuple(letters))

    def settle(self, receipt: Receipt) -> None:
        """Goes by what the shelf says, which may be another one than before."""
        self._expected = receipt.expected
        self._handled = max(self._handled, receipt.handled)
        while self._kept and self._kept[0].number < self._handled:
            self._kept.popleft()

    @property
    def is_sent(self) -> bool:
        """Whether all lies on the shelf, as far as is known."""
        return self._expected >= self._next

    @property
    def is_handled(self) -> bool:
        """Whether nothing has to be kept."""
        return not self._kept

    def _drop(self) -> None:
        records = (i for i, one in enumerate(self._kept) if isinstance(one.event, StepRecord))
        del self._kept[next(records, 0)]
        self.dropped += 1
