"""Interrupts: Ctrl-C and SIGTERM end a run with its state saved; a second one ends it at once.

What is to be done at the end is done, whatever is pressed meanwhile.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from elastrata.step.events import TrainingError

_LOOK_SECONDS = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_running: list[str] = []


class Interrupt:
    """A signal, or the loss of ownership, that comes between a run and its end."""

    def __init__(self) -> None:
        self.signal: str | None = None
        """The name of the signal that asked for the end; None: nobody asked."""
        self.since = 0.0
        """When it came, by the monotonic clock."""
        self._lost: str | None = None

    def lose(self, text: str) -> None:
        """The run is not this process's any more: it must not go on."""
        self._lost = text

    def ask(self, name: str) -> None:
        """Asks for the end, as a signal of that name would."""
        self.signal, self.since = name, time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether the run is another process's now."""
        return self._lost is not None

    def run(
        self, action: Callable[[], None], grace_seconds: float, remind: Callable[[str], None]
    ) -> None:
        """Runs `action` in a thread of its own, so that signals are heard at once.

        Args:
            action: what may be interrupted.
            grace_seconds: how long it may go on after a signal.
            remind: called with the signal's name again and again, for who was asked may have died.

        Raises:
            KeyboardInterrupt: a signal came, and a second one, or `grace_seconds` went by.
            TrainingError: the run is not this process's any more.
            Exception: what `action` raised.
        """
        raised: list[BaseException] = []

        def guarded() -> None:
            try:
                action()
            except BaseException as error:  # it belongs to the thread that waits
                raised.append(error)

        thread = threading.Thread(target=guarded, name="elastrata-fit", daemon=True)
        thread.start()
        try:
            self._wait(thread, grace_seconds, remind)
        except BaseException:
            _abandon(thread)
            raise
        if raised:
            raise raised[0]

    def _wait(
        self, thread: threading.Thread, grace_seconds: float, remind: Callable[[str], None]
    ) -> None:
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if self._lost:
                raise TrainingError(self._lost)
            if self.signal:
                if time.monotonic() - self.since > grace_seconds:
                    raise KeyboardInterrupt(self.signal)
                remind(self.signal)

    @contextmanager
    def heard(self, asked: Callable[[str], None]) -> Iterator[None]:
        """Catches the signals while its block runs. Off the main thread it catches none.

        Args:
            asked: called with the name of the first signal; the second raises KeyboardInterrupt.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal:
                raise KeyboardInterrupt
            name = signal.Signals(number).name
            self.ask(name)
            asked(name)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _abandon(thread: threading.Thread) -> None:
    """Ends a thread with its next line of Python: one that asked a Ray which is gone would end the
    process, with Ray's exit code."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )


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
