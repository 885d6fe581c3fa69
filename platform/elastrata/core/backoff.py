"""Backoff: when to try again what has failed, at growing distances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from elastrata_pipelines.checked_json import UnreadableError
from elastrata_pipelines.errors import UserError

PATIENCE_SECONDS = 1800.0
Result = TypeVar("Result")
FIRST_SECONDS, LONGEST_SECONDS = 5.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How often in a row something has failed, and when it may be tried again. A value: `failed`
    and `succeeded` return the next one.

    The unit is seconds, not steps: what has failed is a storage, which knows nothing of steps.
    `now` is any clock that never goes back, always the same one.
    """

    failures: int = 0
    """In a row; 0 where all is well."""
    due: float | None = None
    """When the next try is due, on the caller's clock; None where there is nothing to repeat."""

    @property
    def seconds(self) -> float:
        """From the newest failure to the next try: doubles with each failure, up to a limit."""
        doublings = max(self.failures - 1, 0)
        # 2.0**1024 is too large a float; the limit is reached long before.
        return min(FIRST_SECONDS * 2.0 ** min(doublings, 64), LONGEST_SECONDS)

    def failed(self, now: float) -> Backoff:
        """After one more failure."""
        failed = Backoff(failures=self.failures + 1)
        return Backoff(failures=failed.failures, due=now + failed.seconds)

    def succeeded(self) -> Backoff:
        """After a success: nothing is to be repeated, and the next failure counts as the first."""
        return Backoff()

    def retry_due(self, now: float) -> bool:
        """Whether to try again now. A try that is under way does not change the answer."""
        return self.due is not None and now >= self.due


def patiently(action: Callable[[], Result], what: str, warn: Callable[[str], None]) -> Result:
    """Tries an action again and again, as long as it fails as storage may; returns its result.

    Args:
        action: tried as it is.
        what: it looks for, as the lines to `warn` call it.
        warn: called with a line for every failure.

    Raises:
        UserError: `action` raised one that is not of storage: trying again cannot help.
        Exception: what `action` raised last, after half an hour of failures.
    """
    backoff, waited = Backoff(), 0.0
    while True:
        try:
            return action()
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, UnreadableError):
                raise
            backoff = backoff.failed(now=waited)
            if waited > PATIENCE_SECONDS:
                raise
            warn(f"{what} cannot be read, tried again in {backoff.seconds:g} s: {error}")
            Event().wait(backoff.seconds)
            waited += backoff.seconds
