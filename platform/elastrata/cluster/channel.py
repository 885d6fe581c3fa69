"""The control channel: carries events from workers to the driver, and signals to the workers.

A `Sender` in each worker sends batches of events to the `ControlChannel`, an actor on the driver's
node; a `Receiver` in the driver takes them from there. Every event arrives at least once: a sender
repeats a batch until the driver has handled it, and events of one sender arrive in order. The
channel may die, or hang and be killed, at any time; an empty one replaces it, and the driver may
receive a batch again. The observer drops duplicates. Training never waits for the channel.
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

from elastrata.cluster.failure_attribution import creation_error
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
"""Shortest time between two batches of step records; a call costs about 0.2 ms."""
# Bounds the actor's memory if the driver is suspended for long.
MOST_IN_A_BATCH = 10_000
"""Most events of a sender that the channel holds, about 10 MB."""
MOST_KEPT = 50_000
"""Most events that a sender holds; beyond, it drops the oldest step records."""
_ANSWER_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
_HANDLE_SECONDS = 0.5
"""Time that the answer to a batch waits for the driver."""
_TAKE_SECONDS, _CLOSE_SECONDS, _NEAR_SECONDS = 1.0, 30.0, 2.0
_FLUSH_SECONDS = 60.0
_DROPPED = "the driver does not answer: steps will be missing in MLflow; the history has them"


@dataclass(frozen=True)
class Answer:
    """The channel's answer to a batch."""

    is_handled: bool
    """True once the driver has handled the batch; otherwise the sender repeats it."""
    signal: ControlSignal | None
    """The present request to the workers."""


@dataclass
class _Batch:
    number: int
    events: Sequence[Event]
    handled: asyncio.Event = field(default_factory=asyncio.Event)


@ray.remote(num_cpus=0, max_restarts=-1)
class ControlChannel:
    """Actor that holds at most one batch of each sender until the driver has handled it."""

    def __init__(self) -> None:
        self._batches: dict[str, _Batch] = {}
        self._taken: dict[str, list[_Batch]] = {}
        self._arrived = asyncio.Event()
        self._signal: ControlSignal | None = None
        self._halted = False
        self._book, self._speeds_changed = SpeedBook(), asyncio.Event()

    async def deliver(self, sender: str, number: int, events: Sequence[Event]) -> Answer:
        """Take the next batch of a sender, or the same one again."""
        batch = self._batches.get(sender)
        if batch is None or batch.number != number:
            batch = self._batches[sender] = _Batch(number, events)
            for event in events:
                self._record(event)
            self._arrived.set()
            # Wakes all present waiters of `speeds`; later ones wait for the next batch.
            self._speeds_changed.set()
            self._speeds_changed = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.handled.wait(), _HANDLE_SECONDS)
        if batch.handled.is_set():
            # Its number stays: the sender may have missed the answer.
            batch.events = ()
        return Answer(batch.handled.is_set(), self._signal)

    async def take(self, seconds: float, ticket: str) -> tuple[str, list[Event]]:
        """Return all events that are not yet handled, and a ticket for them.

        Args:
            seconds: time to wait for the first event; 0 does not wait.
            ticket: ticket of the events that the driver has handled since its last call.
        """
        if ticket in self._taken:
            for batch in self._taken[ticket]:
                batch.handled.set()
            self._taken.clear()
        if not (unhandled := self._find_unhandled()):
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)
            unhandled = self._find_unhandled()
        # Older tickets stay valid: the driver may have missed the answer that had the newest one.
        ticket = uuid.uuid4().hex
        self._taken[ticket] = unhandled
        return ticket, [event for batch in unhandled for event in batch.events]

    def _find_unhandled(self) -> list[_Batch]:
        return [batch for batch in self._batches.values() if not batch.handled.is_set()]

    async def ask(self, signal: ControlSignal) -> None:
        """Send this signal to the workers, unless a stronger one is pending."""
        # Actions are ordered: save, halt, stop.
        if self._signal is None or signal.action > self._signal.action:
            self._signal = signal

    async def withdraw(self, most: Action) -> None:
        """Withdraw a pending signal up to `most`, and reset `has_halted`."""
        self._drop(most)
        self._halted = False

    async def has_halted(self) -> bool:
        """Return True once the workers have saved their state and take no more steps."""
        return self._halted

    async def paces(self) -> Mapping[str, float]:
        """Return the last measured work per second, by node."""
        return self._book.paces()

    async def slow_nodes(self) -> Mapping[str, float]:
        """Return the speed relative to its kind of each node with a slow worker."""
        return self._book.slow_nodes()

    async def speeds(self, group: GroupKey, step: int) -> Speeds | None:
        """Return the speeds by which the steps after this one are assigned to a group's ranks; None
        if training stays too far behind that step for 2 s."""
        deadline = time.monotonic() + _NEAR_SECONDS
        while (speeds := self._book.speeds(group, step)) is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._speeds_changed.wait(), _NEAR_SECONDS)
        return speeds

    def _record(self, event: Event) -> None:
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
    """Start a channel on the driver's node, which ends with the driver."""
    own_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ControlChannel.options(scheduling_strategy=own_node).remote()  # type: ignore[attr-defined]


class Receiver:
    """The driver's end of the channel: calls `handle` with all events, in its own thread.

    Args:
        channel: handle of the channel; it stays valid if the actor is restarted.
        handle: called after every answer of the channel, at least every second, even without
            events.
        fail: called with the reason if the actor cannot be made, so that no answer will come.
    """

    def __init__(
        self,
        channel: Any,
        handle: Callable[[Sequence[Event]], None],
        fail: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._channel = channel
        self._handle = handle
        self._fail = fail
        self._ticket = ""
        self._closed = Flag()
        self._thread = Thread(target=self._receive, name="elastrata-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Handle the events that have arrived, then stop; wait up to 30 s for a channel that is
        away."""
        self._closed.set()
        self._thread.join()

    def _receive(self) -> None:
        while not self._closed.is_set():
            self._take(_TAKE_SECONDS)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._take(0.0) is not False and time.monotonic() < deadline:
            pass

    def _take(self, seconds: float) -> bool | None:
        """Handle new events; return True if there were any, None if the channel did not answer."""
        call = self._channel.take.remote(seconds, self._ticket)
        try:
            ticket, events = ray.get(call, timeout=seconds + _ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            # The first process of a run to import this package: its error is the first cause.
            if reason := creation_error(error):
                self._fail(f"processes of the run cannot start: {reason}")
            Flag().wait(_PAUSE_SECONDS)
            return False if reason else None
        self._handle(events)
        # Set only now: the ticket confirms that its events were handled.
        self._ticket = ticket
        return bool(events)


class Sender:
    """The workers' end of the channel: sends events in its own thread; `send` never blocks.

    Any thread may send. Ranks other than 0 send only events that end their group: refusals, and
    choices that ran out of memory.

    Args:
        channel: handle of the channel.
        rank: rank of the worker.
    """

    def __init__(self, channel: Any, *, rank: int) -> None:
        self._channel = channel
        self._sends_all = rank == 0
        self._name, self._number = uuid.uuid4().hex, 0
        self._changed = Condition()
        self._queue: deque[Event] = deque()
        self._batch: tuple[Event, ...] = ()
        self._has_arrived = False
        self._is_urgent = self._is_closing = self._has_dropped = False
        self._sent_at = float("-inf")
        self._signal: ControlSignal | None = None
        self._thread: Thread | None = None

    def send(self, event: Event) -> None:
        """Send an event; step records are sent together with later ones."""
        if not self._sends_all and not isinstance(event, Refused | RanOut):
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
        # The run's history has the step records, too.
        records = (n for n, event in enumerate(self._queue) if isinstance(event, StepRecord))
        del self._queue[next(records, 0)]
        if not self._has_dropped:
            self._has_dropped = True
            self._queue.append(Warned(text=_DROPPED))

    def look(self) -> ControlSignal | None:
        """Return the signal in the newest answer, without waiting."""
        return self._signal

    def flush(self) -> None:
        """Wait until the channel has all sent events; a minute at most."""
        self._wait_until(lambda: not self._queue and (not self._batch or self._has_arrived))

    def close(self) -> None:
        """Wait until the driver has handled all sent events; a minute at most."""
        self._is_closing = True
        self._wait_until(lambda: not self._queue and not self._batch)

    def leave(self) -> None:
        """Announce that no more events follow; the thread ends once all are handled."""
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
                    self._has_arrived, self._is_urgent = False, bool(self._queue)
            answer = self._deliver()
            with self._changed:
                self._sent_at = time.monotonic()
                if answer:
                    self._signal, self._has_arrived = answer.signal, True
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
                seconds_left = None if is_idle else pause - (time.monotonic() - self._sent_at)
                if seconds_left is not None and seconds_left <= 0:
                    return True
                self._changed.wait(seconds_left)
            self._thread = None
            return False

    def _deliver(self) -> Answer | None:
        """Send the batch; return the channel's answer, None if it does not answer."""
        try:
            call = self._channel.deliver.remote(self._name, self._number, self._batch)
            return cast(Answer, ray.get(call, timeout=_ANSWER_SECONDS))
        except ray.exceptions.RayError:
            return None


def send_event(channel: Any, event: Event) -> None:
    """Send one event from a process that has no sender, without blocking."""
    sender = Sender(channel, rank=0)
    sender.send(event)
    sender.leave()
