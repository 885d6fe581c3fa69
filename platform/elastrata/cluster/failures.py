"""The failures of a launch: how many groups of workers were lost, and how many more may be."""

from __future__ import annotations


class Failures:
    """Counts losses and says how many are left. The only place that does; Ray Train is told what is
    left, and gives up by it.

    Args:
        most: losses to survive; -1: any number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lost_attempt: int | None = None
        self.count = 0
        """Groups of workers that were lost in this launch."""

    def lose(self, attempt: int) -> bool:
        """Counts the loss of an attempt's workers, once, as one loss may be seen in several ways.

        Returns:
            Whether it was not yet counted.
        """
        is_new = attempt != self._lost_attempt
        self._lost_attempt = attempt
        self.count += is_new
        return is_new

    @property
    def left(self) -> int:
        """Losses that the run still survives; -1: any number."""
        return self._most if self._most < 0 else max(0, self._most - self.count)

    @property
    def is_last(self) -> bool:
        """Whether the next loss is one too many."""
        return self.left == 0
