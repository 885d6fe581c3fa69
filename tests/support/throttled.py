"""A process that is held to a share of its time, as by a busy neighbour."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from support.nodes import send

PERIOD = 0.02
"""Seconds."""


@contextmanager
def throttled(process: psutil.Process, share: float) -> Iterator[None]:
    """Stops a process again and again while the block runs, or until it is gone.

    Args:
        process: it.
        share: of each period that it may run in.
    """
    over = threading.Event()
    thread = threading.Thread(target=_throttle, args=(process, share, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _throttle(process: psutil.Process, share: float, over: threading.Event) -> None:
    try:
        while not over.is_set():
            send(process, signal.SIGSTOP)
            over.wait((1 - share) * PERIOD)
            send(process, signal.SIGCONT)
            over.wait(share * PERIOD)
    except ProcessLookupError:
        pass
