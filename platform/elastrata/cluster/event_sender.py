"""The sender: the workers' side of the channel. It waits for nothing, whatever the channel does."""

from __future__ import annotations

import time
import uuid
from threading import Condition, Thread
from typing import Any, cast

import ray

from elastrata.cluster.event_delivery import Acknowledgement, EventBatch, SendQueue
from elastrata.core.events import ControlSignal, Event, RanOut, Refused, Warned
from elastrata.core.record import StepRecord

BATCH_SECONDS = 0.2
"""Step records are sent together at most this often: a call costs some 0.2 ms."""
_ASK_SECONDS = 1.0
"""How often to ask whether the driver has handled all, where nothing is left to be sent."""
_ASK_SECONDS_AT_THE_END = 0.05
_ANSWER_SECONDS = 5.0
"""After that a batch is sent again: it is taken once, however often it comes."""
_FLUSH_SECONDS = 60.0
_DROPPED = (
    "the driver has not answered for so long that MLflow will lack steps; the history has them"
)


class Sender:
    """Sends events from a thread of its own; any thread may send. Ranks beside rank 0 send nothing
    but what ends their group: refusals, and choices that ran out of memory.

    What the driver has not handled stays here, and is sent again where the channel was replaced.
    """

    def __init__(self, channel: Any, *, rank: int) -> None:
        self._channel = channel
        self._speaks = rank == 0
        self._changed = Condition()
        self._queue = SendQueue(uuid.uuid4().hex)
        self._is_urgent = False
        self._closing = False
        self._sent_at = float("-inf")
        self._signal: ControlSignal | None = None
        self._thread: Thread | None = None

    def send(self, event: Event) -> None:
        """Sends an event; step records go together with the next ones."""
        if not self._speaks and not isinstance(event, Refused | RanOut):
            return
        with self._changed:
            self._add(event)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="elastrata-sender", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _add(self, event: Event) -> None:
        dropped = self._queue.dropped
        self._queue.add(event)
        self._is_urgent |= not isinstance(event, StepRecord)
        if not dropped and self._queue.dropped:
            self._queue.add(Warned(text=_DROPPED))

    def look(self) -> ControlSignal | None:
        """Returns what is asked, by the newest answer that has come; waits for none."""
        return self._signal

    def flush(self) -> None:
        """Waits until the channel has all that was sent; a minute at most."""
        with self._changed:
            self._hurry()
            self._changed.wait_for(lambda: self._queue.is_sent, _FLUSH_SECONDS)

    def close(self) -> None:
        """Waits until the driver has handled all that was sent; a minute at most."""
        with self._changed:
            self._closing = True
            self._hurry()
            self._changed.wait_for(lambda: self._queue.is_handled, _FLUSH_SECONDS)

    def leave(self) -> None:
        """Nothing more will be sent; the thread ends when all is handled."""
        with self._changed:
            self._closing = True
            self._hurry()

    def _hurry(self) -> None:
        self._is_urgent = True
        self._changed.notify_all()

    def _run(self) -> None:
        while self._wait():
            with self._changed:
                self._is_urgent = False
                batch = self._queue.batch()
            acknowledgement = self._deliver(batch)
            with self._changed:
                self._sent_at = time.monotonic()
                if acknowledgement:
                    self._queue.acknowledge(acknowledgement)
                    self._signal = acknowledgement.signal
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Waits until the next batch is due; returns whether there will be one."""
        with self._changed:
            # Without Ray nobody listens any more, and a call would start another Ray.
            while ray.is_initialized() and not (self._closing and self._queue.is_handled):
                seconds = self._pause()
                left = None if seconds is None else seconds - (time.monotonic() - self._sent_at)
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
            self._thread = None
            return False

    def _pause(self) -> float | None:
        """Seconds between the last batch and the next one; None: no end of it yet."""
        if self._is_urgent:
            return 0.0
        if not self._queue.is_sent:
            return BATCH_SECONDS
        if self._queue.is_handled:
            return None
        return _ASK_SECONDS_AT_THE_END if self._closing else _ASK_SECONDS

    def _deliver(self, batch: EventBatch) -> Acknowledgement | None:
        """The channel's acknowledgement; None where it does not answer."""
        try:
            call = self._channel.deliver.remote(batch)
            return cast(Acknowledgement, ray.get(call, timeout=_ANSWER_SECONDS))
        except ray.exceptions.RayError:
            return None


def tell(channel: Any, event: Event) -> None:
    """Sends one event from a process that has no sender, and waits for nothing."""
    sender = Sender(channel, rank=0)
    sender.send(event)
    sender.leave()
