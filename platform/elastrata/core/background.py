"""Background work: pieces of work that are done one after the other beside the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeVar

import torch
from typing_extensions import override

Value = TypeVar("Value")
_SECONDS_TO_END = 5.0
"""How long the end waits for work that does not end; the thread then ends with the process."""


class Background(Protocol):
    """Where work is done."""

    def begin(self, work: Callable[[], Value]) -> Future[Value]:
        """Does it; its result, or what it raised."""

    def close(self) -> None:
        """No more work comes."""


class AtOnce(Background):
    """Work is done where it is begun: for rehearsals, and for tests."""

    @override
    def begin(self, work: Callable[[], Value]) -> Future[Value]:
        done: Future[Value] = Future()
        _finish(work, done)
        return done

    @override
    def close(self) -> None:
        pass


class BackgroundThread(Background):
    """A thread of its own; it lasts until `close`.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: work may wait for rows that never come, and the process ends all the same.
        self._thread = Thread(target=self._run, name="elastrata background", daemon=True)
        self._thread.start()

    @override
    def begin(self, work: Callable[[], Value]) -> Future[Value]:
        done: Future[Value] = Future()
        self._work.put(lambda: _finish(work, done))
        return done

    @override
    def close(self) -> None:
        """The thread ends; waits for the work under way, for seconds at most."""
        self._work.put(None)
        self._thread.join(_SECONDS_TO_END)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread has the first one
        while (work := self._work.get()) is not None:
            work()


def _finish(work: Callable[[], Value], done: Future[Value]) -> None:
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
