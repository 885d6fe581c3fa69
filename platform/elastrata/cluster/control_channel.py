"""The control channel: how events get from workers to the driver, and signals to the workers.

It may die, or stop answering and be killed, at any time: an empty one takes its place, and who has
sent what the driver has not handled sends it again. Nobody's steps wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event as Flag
from threading import Thread
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.cluster.event_delivery import (
    Acknowledgement,
    EventBatch,
    EventBuffer,
    NumberedEvent,
    handled_after,
    unhandled,
)
from elastrata.cluster.speed_book import GroupKey, SpeedBook
from elastrata.core.events import Action, ControlSignal, Event, Halted, Heard, Started
from elastrata_pipelines.speeds import Speeds

_ANSWER_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
_TAKE_SECONDS, _CLOSE_SECONDS, _NEAR_SECONDS = 1.0, 30.0, 2.0


@ray.remote(num_cpus=0, max_restarts=-1)
class ControlChannel:
    """Where it is killed, an empty one takes its place. Who calls it calls again."""

    def __init__(self) -> None:
        self._buffer = EventBuffer()
        self._arrived = asyncio.Event()
        self._signal: ControlSignal | None = None
        self._halted = False
        self._book, self._moved = SpeedBook(), asyncio.Event()

    async def deliver(self, batch: EventBatch) -> Acknowledgement:
        """Takes events, and returns how they stand and what is asked of the workers."""
        events, answer = self._buffer.put(batch)
        for event in events:
            self._note(event)
        if events:
            self._arrived.set()
            self._moved.set()
            self._moved = asyncio.Event()
        return Acknowledgement(answer.expected, answer.handled, self._signal)

    async def ask(self, signal: ControlSignal) -> None:
        """Asks this of the workers; a signal that asks for less than one that waits is dropped."""
        if self._signal is None or signal.action > self._signal.action:
            self._signal = signal

    async def withdraw(self, most: Action) -> None:
        """Nothing up to `most` is asked any more, and what was asked before is forgotten."""
        self._drop(most)
        self._halted = False

    async def has_halted(self) -> bool:
        """Whether the group of workers has saved its state and takes no more steps."""
        return self._halted

    async def paces(self) -> Mapping[str, float]:
        """Work by second of the nodes whose workers were measured last, by node."""
        return self._book.paces()

    async def slow_nodes(self) -> Mapping[str, float]:
        """The nodes with a worker that is slower than its kind, and its share of that pace."""
        return self._book.slow_nodes()

    async def speeds(self, group: GroupKey, step: int) -> Speeds | None:
        """The speeds by which the steps behind this one are dealt to a group; None where the
        training does not come near them for a while."""
        deadline = time.monotonic() + _NEAR_SECONDS
        while (speeds := self._book.speeds(group, step)) is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), _NEAR_SECONDS)
        return speeds

    async def take(self, seconds: float, handled: Mapping[str, int]) -> list[NumberedEvent]:
        """All events that are not handled; waits for the first one, but no longer than `seconds`.

        Args:
            seconds: 0 waits for none.
            handled: by sender, below which number all events are handled.
        """
        self._arrived.clear()
        if events := self._buffer.unhandled(handled):
            return events
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)
        return self._buffer.unhandled(handled)

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
    """A channel on the driver's own node, gone with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ControlChannel.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]


class Receiver:
    """The driver's side of the channel: calls `handle` with all events, in
    order and each once, from a thread of its own.

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
            events: list[NumberedEvent] = ray.get(call, timeout=seconds + _ANSWER_SECONDS)
        except ray.exceptions.RayError:
            Flag().wait(_PAUSE_SECONDS)
            return None
        new = list(unhandled(events, self._handled))
        self._handle([numbered.event for numbered in new])
        self._handled |= handled_after(new)
        return bool(new)
