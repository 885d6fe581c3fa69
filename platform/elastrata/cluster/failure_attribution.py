"""Failures: which rank's error ended a group of workers, and how many more losses are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = ("DistError", "FeederLostError")
"""Names of error classes: PyTorch's for collectives, and ours for the rank that reads the data."""
_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "processgroup")
"""Words in errors of collectives that PyTorch raises as a plain RuntimeError."""


def is_victim(error: BaseException) -> bool:
    """Return True if another rank that this one needs has left, or does not answer."""
    if any(kind.__name__ in _KINDS for kind in type(error).__mro__):
        return True
    text = str(error).lower()
    # A build of PyTorch without the backend, which no other rank has caused.
    if "distributed package doesn't have" in text:
        return False
    return type(error) is RuntimeError and any(word in text for word in _WORDS)


def find_culprits(errors: Mapping[int, Exception]) -> dict[int, Exception]:
    """Return the errors, by rank, that are not victims'; all errors if every one is a victim's."""
    primary = {rank: error for rank, error in errors.items() if not is_victim(error)}
    return primary or dict(errors)


_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(NotImplementedError, SyntaxError, TypeError, ValueError),
)
"""Errors that the same code raises again, unlike those of storage, memory and networks."""
_NOT_MADE = "error raised in its creation task"


def creation_error(error: BaseException) -> str | None:
    """Return the last line of the error with which an actor could not be made; None if it lived."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if _NOT_MADE in text else None


class Repetition:
    """Recognises an error that would end every further group of workers in the same way."""

    def __init__(self) -> None:
        self._last: Any = None

    def is_certain(self, error: BaseException, step: int) -> bool:
        """Return True if the last group, too, was ended by this mistake, after the same step.

        Args:
            error: error that ended a group of workers.
            step: newest step on record.
        """
        before, self._last = self._last, (type(error), str(error), step)
        # Some errors of networks are ValueErrors, too; a step of -1 says that storage is away.
        is_mistake = isinstance(error, _MISTAKES) and not isinstance(error, OSError)
        return is_mistake and step >= 0 and bool(str(error)) and before == self._last


# The only count: Ray Train gets `left` at every start, and gives up by it.
class FailureCount:
    """Count of lost groups of workers in one launch.

    Args:
        most: losses to survive; -1 for any number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lost_attempt: int | None = None
        self.count = 0
        """Groups of workers that were lost in this launch."""

    def lose(self, attempt: int) -> bool:
        """Count the loss of an attempt's workers.

        Returns:
            True if it was not yet counted.
        """
        # One loss may be reported in several ways.
        is_new = attempt != self._lost_attempt
        self._lost_attempt = attempt
        self.count += is_new
        return is_new

    def lose_controller(self) -> None:
        """Count the loss of a controller that has not started any workers."""
        self.count += 1

    @property
    def left(self) -> int:
        """Losses that the run still survives; -1 for any number."""
        return self._most if self._most < 0 else max(0, self._most - self.count)

    @property
    def is_last(self) -> bool:
        """True if the run does not survive the next loss."""
        return self.left == 0
