"""Interrupts: Ctrl-C and SIGTERM end a run with its state saved; a second one ends it immediately.

Final work, such as closing the run's record, is completed in spite of further signals.
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
from elastrata_pipelines.errors import UserError

_LOOK_SECONDS = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_running: list[str] = []


class Interrupt:
    """A request to end a run: a signal, or the loss of its ownership."""

    def __init__(self) -> None:
        self.signal: str | None = None
        """The name of the signal that requested the end; None without a request."""
        self.since = 0.0
        """Monotonic time of the request."""
        self._lost: str | None = None
        self._failure: str | None = None

    def fail(self, text: str) -> None:
        """Record why the run can never start: its processes are not waited for."""
        self._failure = text

    def lose(self, text: str) -> None:
        """Record that another process owns the run: this one must stop."""
        self._lost = text

    def ask(self, name: str) -> None:
        """Request the end, as a signal of that name would."""
        self.signal, self.since = name, time.monotonic()

    @property
    def is_lost(self) -> bool:
        """True if another process owns the run."""
        return self._lost is not None

    def run(
        self, action: Callable[[], None], grace_seconds: float, remind: Callable[[str], None]
    ) -> None:
        """Run `action` in another thread, so that signals are handled immediately.

        Args:
            action: work that may be interrupted.
            grace_seconds: time that it may continue after a signal.
            remind: called repeatedly with the signal's name.

        Raises:
            KeyboardInterrupt: a second signal came, or `grace_seconds` passed after the first.
            TrainingError: another process owns the run.
            UserError: the run can never start.
            Exception: the error of `action`.
        """
        raised: list[BaseException] = []

        def guarded() -> None:
            try:
                action()
            except BaseException as error:  # raised again in the waiting thread
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
            if self._failure:
                raise UserError(self._failure)
            if self.signal:
                if time.monotonic() - self.since > grace_seconds:
                    raise KeyboardInterrupt(self.signal)
                # Repeated: the process that received it may have died.
                remind(self.signal)

    @contextmanager
    def heard(self, asked: Callable[[str], None]) -> Iterator[None]:
        """Handle the signals while the block runs. It handles none off the main thread.

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
        handlers_before: dict[int, Any] = {
            number: signal.signal(number, handle) for number in SIGNALS
        }
        try:
            yield
        finally:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)


def _abandon(thread: threading.Thread) -> None:
    """End a thread at its next line of Python."""
    # Otherwise its next call of a Ray that has shut down would end the process with Ray's exit
    # code.
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )


def is_ending() -> bool:
    """Return True if a teardown is in progress in this process."""
    return bool(_running)


@contextmanager
def shield_from_signals(what: str) -> Iterator[None]:
    """Run the block to its end in spite of a signal. A second signal goes to the previous handler.

    Off the main thread, which handles no signals, it changes nothing.

    Args:
        what: description of the work, for the line printed at the first signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers_before: dict[int, Any] = {}
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        # An exception in the middle of a teardown would leave it half done. The second signal is
        # for one that hangs.
        received.append(number)
        if len(received) == 1:
            sys.stderr.write(f"{what}; interrupt again to exit immediately\n")
        elif callable(handlers_before[number]):
            handlers_before[number](number, frame)

    _running.append(what)
    handlers_before.update({number: signal.signal(number, handle) for number in SIGNALS})
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        _running.pop()
