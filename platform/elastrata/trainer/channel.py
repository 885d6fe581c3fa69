"""The channel of a trainer: where its events go, and where requests come from."""

from __future__ import annotations

from typing import Protocol

from elastrata.core.events import ControlSignal, Event


class Channel(Protocol):
    """To and from whoever leads the run: the driver of a cluster, or the trial of a sweep."""

    def send(self, event: Event) -> None:
        """Sends an event; waits for nothing."""

    def look(self) -> ControlSignal | None:
        """The signal to the workers, as far as it is known here; waits for nothing."""

    def flush(self) -> None:
        """Waits until what was sent has left this process; a minute at most."""
