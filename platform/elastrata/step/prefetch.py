"""Prefetch: the next step's micro-batches, collated and copied while a step is trained."""

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
    """A thread of its own; it lasts until `close`."""

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


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """This rank's part of a step, ready for the model."""

    batches: list[Batch]
    """Its micro-batches, on the device."""
    sums: Mapping[str, float]
    """What this rank adds to the sums over the global batch, by name."""


@dataclass(frozen=True)
class _Read:
    """A step that was read, and was made ready if it was known how it will be cut."""

    rank_step: RankStep
    ready: ReadyStep | None = None
    error: Exception | None = None
    """Why it could not be made ready."""


class Prefetch(Iterator[RankStep]):
    """The steps of a stream, in order; with a background, the next one is read and made ready as
    soon as a step is taken.

    Nobody is told of a step that was read and never taken: a run continues from the last one that
    it has trained on, so none is lost."""

    def __init__(
        self,
        stream: Iterable[RankStep],
        prepare: Callable[[RankStep], ReadyStep],
        foreseen: Callable[[RankStep], RankStep | None],
        background: Background | None,
    ) -> None:
        self._stream, self._prepare, self._foreseen = iter(stream), prepare, foreseen
        self._background = background
        self._pending: Future[_Read | None] | None = None
        self._newest: _Read | None = None

    @override
    def __next__(self) -> RankStep:
        if self._background is None:
            return next(self._stream)
        pending = self._pending or self._background.begin(self._read)
        self._newest = pending.result()
        if self._newest is None:
            raise StopIteration
        self._pending = self._background.begin(self._read)
        return self._newest.rank_step

    def ready(self, rank_step: RankStep) -> ReadyStep:
        """The step that was taken last, as it is cut now.

        Raises:
            Exception: what collating it raised.
        """
        if self._newest and self._newest.error:
            raise self._newest.error
        if self._newest and self._newest.ready:
            return self._newest.ready
        return self._prepare(rank_step)

    @property
    def reads_ahead(self) -> bool:
        """Whether steps are made ready before they are asked for, as far as that is possible."""
        return self._background is not None

    @property
    def next_ready(self) -> ReadyStep | None:
        """The step after it, if it is ready by now; waits for nothing."""
        if self._pending is None or not self._pending.done() or self._pending.exception():
            return None
        read = self._pending.result()
        return read.ready if read else None

    def _read(self) -> _Read | None:
        rank_step = next(self._stream, None)
        if rank_step is None:
            return None
        try:
            known = self._foreseen(rank_step)
            return _Read(rank_step, self._prepare(known) if known else None)
        except Exception as error:
            return _Read(rank_step, error=error)

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
