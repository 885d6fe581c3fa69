"""CUDA streams and events of a rehearsal: nothing runs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

import torch

_numbers = count()
Waits = Callable[[str], None]
"""Called where the host waits for the device, with the name of the function that does."""


class FakeEvent:
    """An event that has always happened."""

    waits: Waits = staticmethod(lambda _: None)

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def record(self, stream: FakeStream | None = None) -> Self:
        """Nothing to do."""
        return self

    def wait(self, stream: FakeStream | None = None) -> None:
        """A stream waits for it, the host does not."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        self.waits("Event.synchronize")

    def elapsed_time(self, end: FakeEvent) -> float:
        """No time passes."""
        return 0.0


class FakeStream:
    """A stream of the only device."""

    waits: Waits = staticmethod(lambda _: None)

    def __init__(self, *_: object, **__: object) -> None:
        self.stream_id = next(_numbers)
        self.device = torch.device("cuda", 0)
        self.device_index, self.device_type = 0, 1
        self.cuda_stream = self.stream_id

    def wait_stream(self, stream: FakeStream) -> None:
        """A stream waits, the host does not."""

    def wait_event(self, event: FakeEvent) -> None:
        """A stream waits, the host does not."""

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """An event on it."""
        return (event or FakeEvent()).record(self)

    def query(self) -> bool:
        """All on it is done."""
        return True

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def synchronize(self) -> None:
        """The host waits."""
        self.waits("Stream.synchronize")

    def __enter__(self) -> Self:
        self._entered = on_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


_DEFAULT = FakeStream()
_current = [_DEFAULT]


def default_stream(device: object = None) -> FakeStream:
    """The one that is there from the beginning."""
    return _DEFAULT


def current_stream(device: object = None) -> FakeStream:
    """The one of the innermost `on_stream`."""
    return _current[-1]


def set_stream(stream: FakeStream) -> None:
    """Changes the current stream."""
    _current[-1] = stream


@contextmanager
def on_stream(stream: FakeStream | None) -> Iterator[None]:
    """Its block is on a stream; None: on the current one."""
    _current.append(stream or _current[-1])
    try:
        yield
    finally:
        _current.pop()
