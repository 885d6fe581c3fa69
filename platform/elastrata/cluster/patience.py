"""Patience: how long something has been silent, as far as this process was awake to listen."""

from __future__ import annotations

_LONGEST_LOOK_SECONDS = 2.0
"""Who looks more often than that and finds longer gaps was stopped itself, or starved."""


class Patience:
    """Counts the seconds without a sign of life. A clock that never goes back is passed in.

    What this process has slept through does not count: it would have heard nothing.

    Args:
        seconds: of silence, after which patience is over.
        first_seconds: the same, before the first sign: what starts may take longer.
    """

    def __init__(self, seconds: float, first_seconds: float | None = None) -> None:
        self._seconds = seconds
        self._first_seconds = seconds if first_seconds is None else first_seconds
        self._limit = self._first_seconds
        self._looked: float | None = None
        self.silent = 0.0
        """Seconds since the last sign."""

    def heard(self) -> None:
        """There was a sign of life."""
        self._begin(self._seconds)

    def starts_anew(self) -> None:
        """Something new has yet to give its first sign."""
        self._begin(self._first_seconds)

    def is_over(self, now: float) -> bool:
        """Called at every look, at least every two seconds."""
        if self._looked is not None:
            self.silent += min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        return self.silent > self._limit

    def _begin(self, limit: float) -> None:
        self._limit, self._looked, self.silent = limit, None, 0.0
