"""The mailbox: how events get from the workers to the driver, in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.events import Event, Refused
from elastrata.record import StepRecord

POST_SECONDS = 0.2
"""Step records are posted together at most this often: a post costs the step some 0.2 ms."""
_TAKE_SECONDS = 1.0


@ray.remote(num_cpus=0)
class _Mailbox:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()

    async def post(self, events: list[Event]) -> None:
        self._events.extend(events)
        self._arrived.set()

    async def take(self, seconds: float) -> list[Event]:
        """All events since the last take; waits for the first one, but no longer than `seconds`."""
        if not self._events:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
        self._arrived.clear()
        taken, self._events = self._events, []
        return taken


def open_mailbox() -> Any:
    """A mailbox on the driver's own node, gone with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _Mailbox.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]


class Sender:
    """The workers' side; any thread may send. Ranks beside rank 0 send nothing but refusals."""

    def __init__(self, mailbox: Any, *, rank: int) -> None:
        self._mailbox = mailbox
        self._speaks = rank == 0
        self._lock = Lock()
        self._waiting: list[Event] = []
        self._under_way: Any = None
        self._posted = time.monotonic()

    def send(self, event: Event) -> None:
        """Sends an event; step records go together with the next ones."""
        if not self._speaks and not isinstance(event, Refused):
            return
        with self._lock:
            self._waiting.append(event)
            now = time.monotonic()
            if not isinstance(event, StepRecord) or now - self._posted >= POST_SECONDS:
                self._post()
                self._posted = now

    def close(self) -> None:
        """Sends what is left and waits until all has arrived."""
        with self._lock:
            self._post()
            ray.get(self._under_way)

    def _post(self) -> None:
        # The mailbox runs calls as they come, not in order: the one before must have arrived. It
        # has, nearly always, and this costs nothing.
        if self._under_way is not None:
            ray.get(self._under_way)
        self._under_way = self._mailbox.post.remote(self._waiting)
        self._waiting = []


class Receiver:
    """The driver's side: calls `handle` with all events, in order, from a thread of its own."""

    def __init__(self, mailbox: Any, handle: Callable[[Sequence[Event]], None]) -> None:
        self._mailbox = mailbox
        self._handle = handle
        self._open = True
        self._thread = Thread(target=self._receive, name="elastrata-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Handles what has arrived, then stops."""
        self._open = False
        self._thread.join()

    def _receive(self) -> None:
        while True:
            last = not self._open
            events = ray.get(self._mailbox.take.remote(0 if last else _TAKE_SECONDS))
            if events:
                self._handle(events)
            if last:
                return
