"""The mailbox: how events get from the workers to the driver, and requests to the workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.training.record import StepRecord
from elastrata.training.request import Act, Request
from elastrata.workers.events import Event, Halted, Heard, Refused, Started

POST_SECONDS = 0.2
"""Step records are posted together at most this often: a post costs the step some 0.2 ms."""
_TAKE_SECONDS = 1.0


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class _Mailbox:
    """Where it is killed, as Ray does where memory runs out, an empty one takes its place."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._request: Request | None = None
        self._halted = False

    async def post(self, events: list[Event]) -> Request | None:
        """Takes events, and returns what is asked of the workers."""
        self._events.extend(events)
        self._arrived.set()
        for event in events:
            if isinstance(event, Started):
                self._halted = False
            elif isinstance(event, Heard) and event.act == Act.SAVE:
                self._drop(Act.SAVE)
            elif isinstance(event, Halted):
                self._halted = True
                self._drop(Act.HALT)
        return self._request

    async def ask(self, request: Request) -> None:
        """Asks this of the workers; a request that asks for less than one that waits is dropped."""
        if self._request is None or request.act > self._request.act:
            self._request = request

    async def withdraw(self, most: Act) -> None:
        """Nothing up to `most` is asked any more, and what was asked before is forgotten."""
        self._drop(most)
        self._halted = False

    async def has_halted(self) -> bool:
        """Whether the group of workers has saved its state and takes no more steps."""
        return self._halted

    async def take(self, seconds: float) -> list[Event]:
        """All events since the last take; waits for the first one, but no longer than `seconds`."""
        if not self._events:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
        self._arrived.clear()
        taken, self._events = self._events, []
        return taken

    def _drop(self, most: Act) -> None:
        if self._request and self._request.act <= most:
            self._request = None


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
        self._is_read = True
        self._posted = time.monotonic()
        self._request: Request | None = None

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

    def look(self) -> Request | None:
        """What is asked, by the newest answer that has come; waits for none."""
        with self._lock:
            if not self._is_read and ray.wait([self._under_way], timeout=0)[0]:
                self._read()
            return self._request

    def flush(self) -> None:
        """Sends what is left and waits until all has arrived."""
        with self._lock:
            self._post()
            self._read()

    def _post(self) -> None:
        # The mailbox runs calls as they come, not in order: the one before must have arrived. It
        # has, nearly always, and this costs nothing.
        if not self._is_read:
            self._read()
        self._under_way = self._mailbox.post.remote(self._waiting)
        self._is_read = False
        self._waiting = []

    def _read(self) -> None:
        self._request = ray.get(self._under_way)
        self._is_read = True


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
