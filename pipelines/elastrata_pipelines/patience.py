"""Patience with a remote storage that does not answer for a while."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TypeVar

import pyarrow as pa

from elastrata_pipelines.errors import UserError

PATIENCE_SECONDS = 300.0
FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
Found = TypeVar("Found")

_LASTING = (UserError, FileNotFoundError, PermissionError, pa.ArrowException)
"""What trying again does not mend."""


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


def read_patiently(read: Callable[[], Found], *, is_local: bool) -> Found:
    """What `read` returns; tried again for five minutes where it fails in a way that may pass.

    Raises:
        Exception: what `read` raised last.
    """
    pause, waited = FIRST_SECONDS, 0.0
    while True:
        try:
            return read()
        except Exception as error:
            if waited >= PATIENCE_SECONDS or not may_pass(error, is_local=is_local):
                raise
        Event().wait(pause)
        waited, pause = waited + pause, min(2 * pause, LONGEST_SECONDS)
