"""The interval between copies of a state: as short as their cost allows."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SHARE = 0.02
"""Of the training time that copies may cost."""
_LEAST = 2
"""So that there are steps without a copy, by which the others are measured."""
_REMEMBERED = 32
"""Steps by which it is known how long one takes without a copy."""


class CopyInterval:
    """Steps from one copy to the next: so many that a copy, by what the last one cost, takes at
    most `SHARE` of the time; never more than `most`, whatever it costs.

    A copy costs the seconds that a step waits for it, and those that the steps beside it are longer
    than others.

    Args:
        most: steps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._alone: deque[float] = deque(maxlen=_REMEMBERED)
        self._cost: float | None = None

    def stepped(self, seconds: float, *, beside: bool) -> None:
        """A step is done.

        Args:
            seconds: that it took.
            beside: whether a copy was under way while it was trained.
        """
        if not beside:
            self._alone.append(seconds)
        elif self._cost is not None and self._alone:
            self._cost += max(0.0, seconds - median(self._alone))

    def copied(self, seconds: float) -> None:
        """A copy has begun; the training waited so long for it."""
        self._cost = seconds

    @property
    def wanted(self) -> int:
        """The steps that this rank would leave between copies, by the last one; all it may where it
        knows of none."""
        if self._cost is None or not self._alone:
            return self._most
        steps = math.ceil(self._cost / (SHARE * median(self._alone)))
        return min(self._most, max(_LEAST, steps))
