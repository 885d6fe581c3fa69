"""The channel of a lone trial: there is no driver, so it remembers what the trial must know."""

from __future__ import annotations

from threading import Condition

from elastrata.core.control_signal import ControlSignal
from elastrata.core.events import Committed, Event


class LoneChannel:
    """A channel that remembers which checkpoints are complete."""

    def __init__(self) -> None:
        self._folders: dict[int, str] = {}
        self._changed = Condition()

    def send(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Committed):
            with self._changed:
                self._folders[event.step] = event.uri.rpartition("/")[2]
                self._changed.notify_all()

    def look(self) -> ControlSignal | None:
        """Nobody asks for anything."""
        return None

    def flush(self) -> None:
        """Nothing is under way."""

    def committed(self, step: int, seconds: float) -> str:
        """The folder of the commit of that step; waits for it.

        Raises:
            TimeoutError: it is not complete within so many seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: step in self._folders, seconds):
                raise TimeoutError(f"the checkpoint of step {step} was not saved")
            return self._folders[step]
