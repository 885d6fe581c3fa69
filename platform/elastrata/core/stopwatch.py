"""Stopwatch: what the seconds of a start went to."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds by name, since the birth of the object and one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def passed(self, name: str) -> None:
        """The phase of that name ends now, and the next begins."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
