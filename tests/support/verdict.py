"""The verdict on what reads damaged files: refused in lines that a user can act on, or read."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from elastrata_pipelines.errors import UserError

HANGS_AFTER_SECONDS = 300
_LONGEST_LINE = 1500
Found = TypeVar("Found")


def read_or_refused(read: Callable[[], Found], case: str, *names: str) -> Found | None:
    """What `read` returns; None where it refused, in whole lines that each name one of `names`.

    Args:
        read: whatever reads the files.
        case: what to call it where the test fails: the seed and the mutation.
        names: of files and folders.

    Raises:
        AssertionError: it raised anything else than UserError, hangs, or said it in a bad line.
    """
    try:
        with hangs_are_errors():
            return read()
    except UserError as error:
        lines = error.problems
    except BaseException as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    assert lines, f"{case}: refused without a word"
    for line in lines:
        assert line.isprintable(), f"{case}: not one line: {line!r}"
        assert len(line) < _LONGEST_LINE, f"{case}: too long a line: {line}"
        assert any(name in line for name in names), f"{case}: names no file: {line}"
    return None


@contextmanager
def hangs_are_errors() -> Iterator[None]:
    """Interrupt a read that waits for ever, so that the test can name the file."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"nothing after {HANGS_AFTER_SECONDS} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    left, _ = signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left)  # pytest's own limit is kept by this timer, too
