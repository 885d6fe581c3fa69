"""The receiver: the driver's side of the channel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event as Flag
from threading import Thread
from typing import Any

import ray

from elastrata.cluster.letters import Letter, handled_after, unhandled
from elastrata.core.events import Event

_TAKE_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_CLOSE_SECONDS = 30.0


class Receiver:
    """Calls `handle` with all events, in order and each once, from a thread of its own.

    Args:
        channel: its handle, which stays when it is replaced.
        handle: called whenever the channel has answered, at least every second: with no events,
            where there are none.
    """

    def __init__(self, channel: Any, handle: Callable[[Sequence[Event]], None]) -> None:
        self._channel = channel
        self._handle = handle
        self._handled: dict[str, int] = {}
        self._closed = Flag()
        self._thread = Thread(target=self._receive, name="elastrata-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Handles what has arrived, then stops; waits half a minute for a channel that is away."""
        self._closed.set()
        self._thread.join()

    def _receive(self) -> None:
        while not self._closed.is_set():
            self._take(_TAKE_SECONDS)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._take(0.0) is not False and time.monotonic() < deadline:
            pass

    def _take(self, seconds: float) -> bool | None:
        """Handles what there is; returns whether there was anything, None where nobody answered."""
        call = self._channel.take.remote(seconds, dict(self._handled))
        try:
            letters: list[Letter] = ray.get(call, timeout=seconds + _ANSWER_SECONDS)
        except ray.exceptions.RayError:
            Flag().wait(_PAUSE_SECONDS)
            return None
        new = list(unhandled(letters, self._handled))
        self._handle([letter.event for letter in new])
        self._handled |= handled_after(new)
        return bool(new)
