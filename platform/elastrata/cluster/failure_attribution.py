"""Failures: which rank's error ended a group of workers, and how many more groups may be lost."""

from __future__ import annotations

from collections.abc import Mapping

_KINDS = ("DistError",)
"""PyTorch's own error of collectives, or a base of it."""
_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "processgroup")
"""In errors of collectives that have no kind of their own."""


def is_victim(error: BaseException) -> bool:
    """Return True for an error of a collective: another rank has left, or does not answer."""
    if any(kind.__name__ in _KINDS for kind in type(error).__mro__):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in _WORDS)


def culprits(errors: Mapping[int, Exception]) -> dict[int, Exception]:
    """Return the errors, by rank, that are no victims'; all of them if every one is."""
    own = {rank: error for rank, error in errors.items() if not is_victim(error)}
    return own or dict(errors)


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
