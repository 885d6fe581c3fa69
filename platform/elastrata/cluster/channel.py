"""The control channel: how events get from workers to the driver, and signals to the workers.

A `Sender` in each worker sends batches of events to the `ControlChannel`, an actor on the driver's
node; a `Receiver` in the driver takes them from there. Every event arrives at least once: a sender
repeats a batch until the driver has handled it, and events of one sender arrive in their order. The
channel may die, or stop answering and be killed, at any time; an empty one takes its place, and the
driver may then get a batch again. The observer drops what it has. No step waits for any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from threading import Event as Flag
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.cluster.node_speeds import GroupKey, SpeedBook
from elastrata.step.events import (
    Action,
    ControlSignal,
    Event,
    Halted,
    Heard,
    RanOut,
    Refused,
    Started,
    Warned,
)
from elastrata.step.records import StepRecord
from elastrata_pipelines.speeds import Speeds

BATCH_SECONDS = 0.2
"""Step records are sent together at most this often: a call costs some 0.2 ms."""
MOST_IN_A_BATCH = 10_000
"""Events, some 10 MB, of each sender in the channel: a driver may be stopped for long."""
MOST_KEPT = 50_000
"""Events that a sender keeps; beyond, the oldest step records are dropped."""
_ANSWER_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
_HANDLE_SECONDS = 0.5
"""Time that an answer to a batch waits for the driver, before it only tells the signal."""
_TAKE_SECONDS, _CLOSE_SECONDS, _NEAR_SECONDS = 1.0, 30.0, 2.0
_FLUSH_SECONDS = 60.0
_DROPPED = (
    "the driver has not answered for so long that MLflow will lack steps; the history has them"
)


@dataclass(frozen=True)
class Answer:
    """The channel's answer to a batch."""

    is_handled: bool
    """True once the driver has handled the batch; else it is to be sent again."""
    signal: ControlSignal | None
    """What is asked of the workers."""


@dataclass
class _Batch:
    number: int
    events: Sequence[Event]
    handled: asyncio.Event = field(default_factory=asyncio.Event)


@ray.remote(num_cpus=0, max_restarts=-1)
class ControlChannel:
    """Holds at most one batch of each sender until the driver has handled it."""

    def __init__(self) -> None:
        self._batches: dict[str, _Batch] = {}
        self._taken: dict[str, list[_Batch]] = {}
        self._arrived = asyncio.Event()
        self._signal: ControlSignal | None = None
        self._halted = False
        self._book, self._moved = SpeedBook(), asyncio.Event()

    async def deliver(self, sender: str, number: int, events: Sequence[Event]) -> Answer:
        """Take the next batch of a sender, or the same one again."""
        batch = self._batches.get(sender)
        if batch is None or batch.number != number:
            batch = self._batches[sender] = _Batch(number, events)
            for event in events:
                self._note(event)
            self._arrived.set()
            self._moved.set()
            self._moved = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.handled.wait(), _HANDLE_SECONDS)
        if batch.handled.is_set():
            batch.events = ()  # its number stays: the sender may have missed the answer
        return Answer(batch.handled.is_set(), self._signal)

    async def take(self, seconds: float, ticket: str) -> tuple[str, list[Event]]:
        """Return all events that are not handled, and the ticket for them.

        Args:
            seconds: to wait for the first one; 0: not at all.
            ticket: of the events that the driver has handled since it last called.
        """
        if ticket in self._taken:
            for batch in self._taken[ticket]:
                batch.handled.set()
            self._taken.clear()
        if not (waiting := self._waiting()):
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
            waiting = self._waiting()
        # Older tickets stay valid: the driver may have missed the answer that had the newest one.
        ticket = uuid.uuid4().hex
        self._taken[ticket] = waiting
        return ticket, [event for batch in waiting for event in batch.events]

    def _waiting(self) -> list[_Batch]:
        return [batch for batch in self._batches.values() if not batch.handled.is_set()]

    async def ask(self, signal: ControlSignal) -> None:
        """Ask this of the workers, unless they are asked for more already."""
        if self._signal is None or signal.action > self._signal.action:
            self._signal = signal

    async def withdraw(self, most: Action) -> None:
        """Ask nothing up to `most` any more, and forget that it was asked."""
        self._drop(most)
        self._halted = False

    async def has_halted(self) -> bool:
        """Return True once the workers have saved their state and take no more steps."""
        return self._halted

    async def paces(self) -> Mapping[str, float]:
        """Return the work by second of the nodes whose workers were measured last, by node."""
        return self._book.paces()

    async def slow_nodes(self) -> Mapping[str, float]:
        """Return, by node with a worker that is slower than its kind, its share of that pace."""
        return self._book.slow_nodes()

    async def speeds(self, group: GroupKey, step: int) -> Speeds | None:
        """Return the speeds by which the steps behind this one are dealt to a group; None if the
        training does not come near them for a while."""
        deadline = time.monotonic() + _NEAR_SECONDS
        while (speeds := self._book.speeds(group, step)) is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), _NEAR_SECONDS)
        return speeds

    def _note(self, event: Event) -> None:
        self._book.note(event)
        match event:
            case Started():
                self._halted = False
            case Heard(action=Action.SAVE):
                self._drop(Action.SAVE)
            case Halted():
                self._halted = True
                self._drop(Action.HALT)

    def _drop(self, most: Action) -> None:
        if self._signal and self._signal.action <= most:
            self._signal = None


def open_channel() -> Any:
    """Return a channel on the driver's own node, gone with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ControlChannel.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]


class Receiver:
    """The driver's side of the channel: calls `handle` with all events, from a thread of its own.

    Args:
        channel: its handle, which stays when it is replaced.
        handle: called whenever the channel has answered, at least every second: with no events, if
            there are none.
    """

    def __init__(self, channel: Any, handle: Callable[[Sequence[Event]], None]) -> None:
        self._channel = channel
        self._handle = handle
        self._ticket = ""
        self._closed = Flag()
        self._thread = Thread(target=self._receive, name="elastrata-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Handle what has arrived, then stop; wait half a minute for a channel that is away."""
        self._closed.set()
        self._thread.join()

    def _receive(self) -> None:
        while not self._closed.is_set():
            self._take(_TAKE_SECONDS)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._take(0.0) is not False and time.monotonic() < deadline:
            pass

    def _take(self, seconds: float) -> bool | None:
        """Handle what there is; return True if there was anything, None without an answer."""
        call = self._channel.take.remote(seconds, self._ticket)
        try:
            ticket, events = ray.get(call, timeout=seconds + _ANSWER_SECONDS)
        except ray.exceptions.RayError:
            Flag().wait(_PAUSE_SECONDS)
            return None
        self._handle(events)
        self._ticket = ticket
        return bool(events)


class Sender:
    """The workers' side of the channel: sends events from a thread of its own, and waits for
    nothing. Any thread may send. Ranks other than 0 send only what ends their group: refusals, and
    choices that ran out of memory.
    """

    def __init__(self, channel: Any, *, rank: int) -> None:
        self._channel = channel
        self._speaks = rank == 0
        self._name, self._number = uuid.uuid4().hex, 0
        self._changed = Condition()
        self._queue: deque[Event] = deque()
        self._batch: tuple[Event, ...] = ()
        self._is_known = False
        self._is_urgent = self._is_closing = self._has_dropped = False
        self._sent_at = float("-inf")
        self._signal: ControlSignal | None = None
        self._thread: Thread | None = None

    def send(self, event: Event) -> None:
        """Send an event; step records go together with the next ones."""
        if not self._speaks and not isinstance(event, Refused | RanOut):
            return
        with self._changed:
            if len(self._queue) >= MOST_KEPT:
                self._drop()
            self._queue.append(event)
            self._is_urgent |= not isinstance(event, StepRecord)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="elastrata-sender", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _drop(self) -> None:
        """Drop the oldest step record."""
        records = (n for n, event in enumerate(self._queue) if isinstance(event, StepRecord))
        del self._queue[next(records, 0)]
        if not self._has_dropped:
            self._has_dropped = True
            self._queue.append(Warned(text=_DROPPED))

    def look(self) -> ControlSignal | None:
        """Return what is asked by the newest answer; wait for none."""
        return self._signal

    def flush(self) -> None:
        """Wait until the channel has all that was sent; a minute at most."""
        self._wait_until(lambda: not self._queue and (not self._batch or self._is_known))

    def close(self) -> None:
        """Wait until the driver has handled all that was sent; a minute at most."""
        self._is_closing = True
        self._wait_until(lambda: not self._queue and not self._batch)

    def leave(self) -> None:
        """Say that no more will be sent; the thread ends when all is handled."""
        with self._changed:
            self._is_closing = self._is_urgent = True
            self._changed.notify_all()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(is_done, _FLUSH_SECONDS)

    def _run(self) -> None:
        while self._wait():
            with self._changed:
                if not self._batch:
                    count = min(len(self._queue), MOST_IN_A_BATCH)
                    self._batch = tuple(self._queue.popleft() for _ in range(count))
                    self._number += 1
                    self._is_known, self._is_urgent = False, bool(self._queue)
            answer = self._deliver()
            with self._changed:
                self._sent_at = time.monotonic()
                if answer:
                    self._signal, self._is_known = answer.signal, True
                    self._batch = () if answer.is_handled else self._batch
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait until the next call is due; return False if there will be none."""
        with self._changed:
            # Without Ray no driver listens any more, and a call would start another Ray.
            while ray.is_initialized():
                is_idle = not self._batch and not self._queue
                if is_idle and self._is_closing:
                    break
                pause = 0.0 if self._is_urgent and not self._batch else BATCH_SECONDS
                left = None if is_idle else pause - (time.monotonic() - self._sent_at)
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
            self._thread = None
            return False

    def _deliver(self) -> Answer | None:
        """Send the batch; return the channel's answer, None if it does not answer."""
        try:
            call = self._channel.deliver.remote(self._name, self._number, self._batch)
            return cast(Answer, ray.get(call, timeout=_ANSWER_SECONDS))
        except ray.exceptions.RayError:
            return None


def tell(channel: Any, event: Event) -> None:
    """Send one event from a process that has no sender, and wait for nothing."""
    sender = Sender(channel, rank=0)
    sender.send(event)
    sender.leave()
