"""The lineage of a run: which steps of which attempts made its state what it is.

An attempt goes on from the state before it, from the step that it starts at: later steps of others
count no more. A user may return to a checkpoint that the run had gone back behind; then the run is
the attempt of that checkpoint, and all that was before it, up to its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastrata.checkpoints.commit import FolderName

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """Where the run went on from."""

    attempt: int
    """Who went on, or returned."""
    step: int
    origin: int | None
    """The attempt that was returned to; None: the one before."""


class Lineage:
    """The states that count, event by event in the order of the history."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def event(self, entry: Entry) -> Event | None:
        """Takes an entry; None where it changes nothing."""
        if entry["kind"] not in ("started", "returned"):
            return None
        folder = FolderName.parse(entry.get("commit", "")) if entry["kind"] == "returned" else None
        event = Event(entry["attempt"], entry["step"], folder.attempt if folder else None)
        self._events.append(event)
        return event

    def left(self, event: Event, counting: Sequence[Entry], seen: Sequence[Entry]) -> list[Entry]:
        """The entries that count after the newest event.

        Args:
            event: the newest.
            counting: entries, each about a step, that counted before it.
            seen: all that there were before it.
        """
        if event.origin is None:
            return [entry for entry in counting if entry["step"] <= event.step]
        return [entry for entry in seen if self.counts(entry["attempt"], entry["step"])]

    def counts(self, attempt: int, step: int) -> bool:
        """Whether a state of that attempt, after that step, is one of the run's as it is now."""
        return self.contradiction(attempt, step) is None

    def contradiction(self, attempt: int, step: int) -> Event | None:
        """The newest event by which that state counts no more; None: it counts.

        An attempt without an event left no line on storage: the run knows nothing of it.
        """
        newest = None
        for event in reversed(self._events):
            if event.attempt <= attempt and event.origin is None:
                return None
            if newest is not None and event.attempt > newest:
                continue  # returned behind it
            if step > event.step:
                return event
            if event.origin is not None:
                newest = event.origin
                if newest < attempt:
                    return event
        return None
