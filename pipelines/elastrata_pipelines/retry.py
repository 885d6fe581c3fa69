"""Retries of reading, for a remote storage that does not answer for a while."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TypeVar

import pyarrow as pa

from elastrata_pipelines.errors import UserError

RETRY_SECONDS = 300.0
FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
Read = TypeVar("Read")

_LASTING = (UserError, FileNotFoundError, PermissionError, pa.ArrowException)
"""Errors that trying again does not mend."""


def may_pass(error: Exception, *, is_local: bool) -> bool:
    """Whether an error of reading may go away by itself. Those of local disks do not, nor do those
    of the bytes that came: their `OSError` is Arrow's own, without a number.

    Args:
        error: what reading raised.
        is_local: whether a folder of this machine was read.
    """
    if is_local or isinstance(error, _LASTING):
        return False
    return not isinstance(error, OSError) or error.errno is not None


def with_retries(read: Callable[[], Read], *, is_local: bool) -> Read:
    """Reads; tries again for five minutes where that fails in a way that may pass.

    Raises:
        Exception: what `read` raised last.
    """
    pause, waited = FIRST_SECONDS, 0.0
    while True:
        try:
            return read()
        except Exception as error:
            if waited >= RETRY_SECONDS or not may_pass(error, is_local=is_local):
                raise
        Event().wait(pause)
        waited, pause = waited + pause, min(2 * pause, LONGEST_SECONDS)
