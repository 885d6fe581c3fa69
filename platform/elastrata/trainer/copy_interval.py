"""The interval between in-memory checkpoints, as short as their cost allows."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SHARE = 0.02
"""Largest share of the training time that copies may cost."""
_LEAST = 2
"""Lower bound of the interval. Steps without a copy are needed as the baseline for those with one.
"""
_BASELINE_STEPS = 32
"""Number of steps without a copy that the baseline uses."""


class CopyInterval:
    """Number of steps between copies for which a copy, by the cost of the last one, takes at most
    `SHARE` of the time, and never more than `most` steps.

    A copy costs the seconds that a step waits for it, plus the extra seconds of steps that run
    while it is written.

    Args:
        most: largest interval in steps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds_without_copy: deque[float] = deque(maxlen=_BASELINE_STEPS)
        self._cost: float | None = None

    def stepped(self, seconds: float, *, beside: bool) -> None:
        """Add the time of a finished step.

        Args:
            seconds: duration of the step.
            beside: whether a copy was in progress during the step.
        """
        if not beside:
            self._seconds_without_copy.append(seconds)
        elif self._cost is not None and self._seconds_without_copy:
            # A step during a copy competes with it for cores; its extra time is part of the cost.
            self._cost += max(0.0, seconds - median(self._seconds_without_copy))

    def copied(self, seconds: float) -> None:
        """Start the cost of a new copy with the seconds that the training waited for it."""
        self._cost = seconds

    @property
    def wanted(self) -> int:
        """This rank's interval in steps, by the cost of the last copy; `most` if there was none."""
        if self._cost is None or not self._seconds_without_copy:
            return self._most
        steps = math.ceil(self._cost / (SHARE * median(self._seconds_without_copy)))
        return min(self._most, max(_LEAST, steps))
