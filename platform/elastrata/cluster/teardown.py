"""The teardown: what is to be done at the end is done, whatever is pressed meanwhile."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_running: list[str] = []


def is_ending() -> bool:
    """Whether a teardown is under way in this process."""
    return bool(_running)


@contextmanager
def undisturbed(what: str) -> Iterator[None]:
    """Runs its block to the end, though a signal comes: an exception in the midst of it would leave
    half of the work. A second signal goes to whoever handled it before, for what hangs.

    Off the main thread, where no signal is handled, it changes nothing.

    Args:
        what: is being done, for the line that the first signal is answered with.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            sys.stderr.write(f"{what}; once more to leave at once\n")
        elif callable(before[number]):
            before[number](number, frame)

    _running.append(what)
    before.update({number: signal.signal(number, handle) for number in SIGNALS})
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _running.pop()
