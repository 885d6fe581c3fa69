"""The control channel: how events get from workers to the driver, and signals to the workers.

It may die, or stop answering and be killed, at any time: an empty one takes its place, and who has
sent what the driver has not handled sends it again. Nobody's steps wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.cluster.letters import Letter, Parcel, Receipt, Shelf
from elastrata.core.control_signal import Action, ControlSignal
from elastrata.core.events import Event, Halted, Heard, Started

_ANSWER_SECONDS, _PAUSE_SECONDS = 5.0, 0.2


@ray.remote(num_cpus=0, max_restarts=-1)
class ControlChannel:
    """Where it is killed, an empty one takes its place. Who calls it calls again."""

    def __init__(self) -> None:
        self._shelf = Shelf()
        self._arrived = asyncio.Event()
        self._request: ControlSignal | None = None
        self._halted = False

    async def ping(self) -> None:
        """Answers."""

    async def raylet(self) -> int:
        """The pid of the process that has started this one."""
        return os.getppid()

    async def post(self, parcel: Parcel) -> Receipt:
        """Takes events, and returns how they stand and what is asked of the workers."""
        events, receipt = self._shelf.put(parcel)
        for event in events:
            self._note(event)
        if events:
            self._arrived.set()
        return Receipt(receipt.expected, receipt.handled, self._request)

    async def ask(self, request: ControlSignal) -> None:
        """Asks this of the workers; a request that asks for less than one that waits is dropped."""
        if self._request is None or request.action > self._request.action:
            self._request = request

    async def withdraw(self, most: Action) -> None:
        """Nothing up to `most` is asked any more, and what was asked before is forgotten."""
        self._drop(most)
        self._halted = False

    async def has_halted(self) -> bool:
        """Whether the group of workers has saved its state and takes no more steps."""
        return self._halted

    async def take(self, seconds: float, handled: Mapping[str, int]) -> list[Letter]:
        """All letters that are not handled; waits for the first one, but no longer than `seconds`.

        Args:
            seconds: 0 waits for none.
            handled: by sender, below which number all letters are handled.
        """
        self._arrived.clear()
        if found := self._shelf.unhandled(handled):
            return found
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)
        return self._shelf.unhandled(handled)

    def _note(self, event: Event) -> None:
        match event:
            case Started():
                self._halted = False
            case Heard(action=Action.SAVE):
                self._drop(Action.SAVE)
            case Halted():
                self._halted = True
                self._drop(Action.HALT)

    def _drop(self, most: Action) -> None:
        if self._request and self._request.action <= most:
            self._request = None


def open_channel() -> Any:
    """A channel on the driver's own node, gone with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ControlChannel.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]


def raylet_of(channel: Any) -> int:
    """The pid of the raylet on the channel's node; -1, which nobody has, where Ray has ended."""
    while ray.is_initialized():
        with contextlib.suppress(ray.exceptions.RayError):
            return int(ray.get(channel.raylet.remote(), timeout=_ANSWER_SECONDS))
        time.sleep(_PAUSE_SECONDS)
    return -1
