"""Prefetching: collates and copies the next step's micro-batches while a step is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Protocol, Self, TypeVar

import torch
from typing_extensions import override

from elastrata.workload.batch import Batch
from elastrata_pipelines.payload import RankStep

Value = TypeVar("Value")
_JOIN_TIMEOUT_SECONDS = 5.0
"""Longest wait for unfinished work on `close`. The daemon thread then ends with the process."""


class Background(Protocol):
    """Executes work asynchronously."""

    def begin(self, work: Callable[[], Value]) -> Future[Value]:
        """Start the work and return a future of its result or exception."""

    def close(self) -> None:
        """Accept no more work."""


class SynchronousBackground(Background):
    """Executes work synchronously in `begin`, for rehearsals and tests."""

    @override
    def begin(self, work: Callable[[], Value]) -> Future[Value]:
        future: Future[Value] = Future()
        _complete(work, future)
        return future

    @override
    def close(self) -> None:
        pass


class BackgroundThread(Background):
    """Executes work in one background thread, until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon, so that work which waits forever for rows does not keep the process alive.
        self._thread = Thread(target=self._run, name="elastrata background", daemon=True)
        self._thread.start()

    @override
    def begin(self, work: Callable[[], Value]) -> Future[Value]:
        future: Future[Value] = Future()
        self._work.put(lambda: _complete(work, future))
        return future

    @override
    def close(self) -> None:
        """End the thread after the current work, or after a few seconds."""
        self._work.put(None)
        self._thread.join(_JOIN_TIMEOUT_SECONDS)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread
        while (work := self._work.get()) is not None:
            work()


def _complete(work: Callable[[], Value], future: Future[Value]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """This rank's part of a step, ready for the model."""

    batches: list[Batch]
    """Micro-batches on the device."""
    sums: Mapping[str, float]
    """This rank's summands of the sums over the global batch, by name."""


@dataclass(frozen=True)
class _PrefetchedStep:
    """A step that was read, and prepared if its division into micro-batches could be predicted."""

    rank_step: RankStep
    ready: ReadyStep | None = None
    error: Exception | None = None
    """Reason why it could not be prepared."""


class Prefetch(Iterator[RankStep]):
    """Iterates over the steps of a stream in order.

    With a background, the next step is read and prepared as soon as a step is taken.
    """

    def __init__(
        self,
        stream: Iterable[RankStep],
        prepare: Callable[[RankStep], ReadyStep],
        foreseen: Callable[[RankStep], RankStep | None],
        background: Background | None,
    ) -> None:
        self._stream, self._prepare, self._predict = iter(stream), prepare, foreseen
        self._background = background
        self._pending: Future[_PrefetchedStep | None] | None = None
        self._newest: _PrefetchedStep | None = None

    @override
    def __next__(self) -> RankStep:
        if self._background is None:
            return next(self._stream)
        pending = self._pending or self._background.begin(self._read)
        self._newest = pending.result()
        if self._newest is None:
            raise StopIteration
        # A step that is read ahead and never taken is not lost: a run continues after the last step
        # that it has trained on.
        self._pending = self._background.begin(self._read)
        return self._newest.rank_step

    def ready(self, rank_step: RankStep) -> ReadyStep:
        """Return the micro-batches of the newest step, with its current division.

        Raises:
            Exception: collating it failed in the background.
        """
        if self._newest and self._newest.error:
            raise self._newest.error
        if self._newest and self._newest.ready:
            return self._newest.ready
        return self._prepare(rank_step)

    @property
    def reads_ahead(self) -> bool:
        """Whether steps are read and prepared in advance."""
        return self._background is not None

    @property
    def next_ready(self) -> ReadyStep | None:
        """The following step if it is ready already, else None; never blocks."""
        # An exception is raised later, by the step that it belongs to.
        if self._pending is None or not self._pending.done() or self._pending.exception():
            return None
        read = self._pending.result()
        return read.ready if read else None

    def _read(self) -> _PrefetchedStep | None:
        rank_step = next(self._stream, None)
        if rank_step is None:
            return None
        try:
            predicted = self._predict(rank_step)
            return _PrefetchedStep(rank_step, self._prepare(predicted) if predicted else None)
        except Exception as error:
            # Raised in `ready`, in the step that the error belongs to.
            return _PrefetchedStep(rank_step, error=error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._background is not None:
            self._background.close()
