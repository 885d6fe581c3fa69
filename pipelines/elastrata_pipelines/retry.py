"""Retries with increasing pauses, for temporary failures of storage or of another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

import pyarrow as pa
from tenacity import RetryCallState, Retrying, retry_if_exception, sleep_using_event
from tenacity.stop import stop_after_delay
from tenacity.wait import wait_exponential

from elastrata_pipelines.checked_json import UnreadableError
from elastrata_pipelines.errors import UserError

RETRY_SECONDS, FIRST_SECONDS, LONGEST_SECONDS = 300.0, 1.0, 30.0
"""Total time for which a read of data is retried, and the shortest and longest pause between
attempts."""
# Longer, because no worker can continue without the state of the run.
PATIENCE_SECONDS, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1800.0, 5.0, 300.0
"""The same times for reading the state of a run."""
Result = TypeVar("Result")

_LASTING = (UserError, FileNotFoundError, PermissionError, pa.ArrowException)
"""Errors that a retry cannot fix."""


def is_temporary(error: BaseException, *, is_local: bool) -> bool:
    """Return whether a read error may be temporary.

    Args:
        error: exception that the read raised.
        is_local: whether a local folder was read.
    """
    # Errors of local disks do not go away.
    if is_local or not isinstance(error, Exception) or isinstance(error, _LASTING):
        return False
    # Arrow reports damaged bytes as an OSError without a number.
    return not isinstance(error, OSError) or error.errno is not None


def with_retries(read: Callable[[], Result], *, is_local: bool) -> Result:
    """Call `read`, and retry for five minutes while it fails with errors that may be temporary.

    Raises:
        Exception: the last error that `read` raised.
    """
    return Retrying(
        retry=retry_if_exception(lambda error: is_temporary(error, is_local=is_local)),
        wait=wait_exponential(FIRST_SECONDS, LONGEST_SECONDS),
        stop=stop_after_delay(RETRY_SECONDS),
        sleep=sleep_using_event(Event()),
        reraise=True,
    )(read)


def retry_storage_action(
    action: Callable[[], Result], what: str, warn: Callable[[str], None]
) -> Result:
    """Retry an action while it fails with storage errors, and return its result.

    Args:
        action: function to call.
        what: name of the object that the action reads, for warnings.
        warn: called with one line for every failure.

    Raises:
        UserError: the error of `action`, if it is not a storage error, since a retry cannot help.
        Exception: the last error of `action`, after half an hour of failures.
    """

    def report(state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        warn(f"{what} cannot be read, tried again in {state.upcoming_sleep:g} s: {error}")

    return Retrying(
        retry=retry_if_exception(_is_of_storage),
        wait=wait_exponential(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS),
        stop=stop_after_delay(PATIENCE_SECONDS),
        sleep=sleep_using_event(Event()),
        before_sleep=report,
        reraise=True,
    )(action)


def _is_of_storage(error: BaseException) -> bool:
    is_mistake = isinstance(error, UserError) and not isinstance(error, UnreadableError)
    return isinstance(error, Exception) and not is_mistake


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Number of consecutive failures and time of the next attempt, for callers that do other work.

    `now` is a time of one monotonic clock.
    """

    failures: int = 0
    """Number of consecutive failures; 0 after a success."""
    due: float | None = None
    """Time at which the next attempt is due; None if there is nothing to repeat."""

    @property
    def seconds(self) -> float:
        """Time from the last failure to the next attempt, which doubles with each failure up to
        a limit."""
        # 2.0**1024 is too large a float; the limit is reached long before.
        doublings = min(max(self.failures - 1, 0), 64)
        return min(FIRST_PAUSE_SECONDS * 2.0**doublings, LONGEST_PAUSE_SECONDS)

    def after_failure(self, now: float) -> Backoff:
        """Return the state after one more failure."""
        failed = Backoff(failures=self.failures + 1)
        return Backoff(failures=failed.failures, due=now + failed.seconds)

    def is_retry_due(self, now: float) -> bool:
        """Return whether the next attempt is due. An attempt in progress does not change the
        result."""
        return self.due is not None and now >= self.due
