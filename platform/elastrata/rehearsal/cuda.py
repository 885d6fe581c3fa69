"""Replacement of `torch.cuda` in a rehearsal: a device with memory and streams but no
computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from elastrata.rehearsal.ledger import Ledger

_GIB = 2**30
_numbers = count()
Waits = Callable[[str], None]
"""Callback for each wait of the host for the device, with the name of the waiting function."""


class FakeEvent:
    """An event that has always happened."""

    waits: Waits = staticmethod(lambda _: None)

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def record(self, stream: FakeStream | None = None) -> Self:
        """Do nothing."""
        return self

    def wait(self, stream: FakeStream | None = None) -> None:
        """Do nothing: a stream waits, not the host."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def synchronize(self) -> None:
        """Record a wait of the host."""
        self.waits("Event.synchronize")

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return zero: no time passes."""
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
        """Do nothing: a stream waits, not the host."""

    def wait_event(self, event: FakeEvent) -> None:
        """Do nothing: a stream waits, not the host."""

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Return an event on this stream."""
        return (event or FakeEvent()).record(self)

    def query(self) -> bool:
        """Return True: all work is finished."""
        return True

    def is_capturing(self) -> bool:
        """Return False: graphs are never captured."""
        return False

    def synchronize(self) -> None:
        """Record a wait of the host."""
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
    """Return the default stream."""
    return _DEFAULT


def current_stream(device: object = None) -> FakeStream:
    """Return the stream of the innermost `on_stream`."""
    return _current[-1]


def set_stream(stream: FakeStream) -> None:
    """Set the current stream."""
    _current[-1] = stream


@contextmanager
def on_stream(stream: FakeStream | None) -> Iterator[None]:
    """Run a block on a stream; None: on the current one."""
    _current.append(stream or _current[-1])
    try:
        yield
    finally:
        _current.pop()


@dataclass(frozen=True, kw_only=True)
class FakeDevice:
    """A GPU with the properties that the driver reports."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 80 * _GIB
    multiprocessors: int = 132
    per_node: int = 8

    @property
    def properties(self) -> SimpleNamespace:
        """The device's properties, as `torch.cuda.get_device_properties` returns them."""
        return SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            total_memory=self.memory_bytes,
            multi_processor_count=self.multiprocessors,
            L2_cache_size=50 * 2**20,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            gcnArchName=None,
        )


@contextmanager
def fake_cuda(device: FakeDevice, ledger: Ledger) -> Iterator[None]:
    """Answer torch's queries of `torch.cuda` for a device, and record waits in a ledger.

    Allocated memory is that of the ledger's live tensors; no further memory is reserved.
    """
    waits = staticmethod(ledger.host_waits)
    with ExitStack() as patches:
        for name, value in _answers(device, ledger).items():
            patches.enter_context(patch.object(torch.cuda, name, value))
        for kind in (FakeStream, FakeEvent):
            patches.enter_context(patch.object(kind, "waits", waits))
        accelerator = {
            "current_stream": lambda _=None: current_stream(),
            "current_device_index": lambda: 0,
            "synchronize": lambda _=None: ledger.host_waits("synchronize"),
        }
        for name, value in accelerator.items():
            patches.enter_context(patch.object(torch.accelerator, name, value))
        # Otherwise FakeTensorMode asks a driver whether the device may be initialised.
        always = property(lambda _: True)
        patches.enter_context(patch.object(FakeTensorMode, "avoid_device_init", always))
        yield


def _answers(device: FakeDevice, ledger: Ledger) -> Mapping[str, Any]:
    """Return the replacement of each function of `torch.cuda`."""

    def always(value: object) -> Any:
        # A new function each time, as torch.compile has a table of functions.
        return lambda *_, **__: value

    return {
        "is_available": always(True),
        "is_initialized": always(True),
        "init": always(None),
        "_lazy_init": always(None),
        "is_bf16_supported": always(device.capability >= (8, 0)),
        "device_count": always(device.per_node),
        "current_device": always(0),
        "set_device": always(None),
        "get_device_name": always(device.name),
        "get_device_capability": always(device.capability),
        "get_device_properties": always(device.properties),
        "get_arch_list": always([f"sm_{device.capability[0]}{device.capability[1]}"]),
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": on_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "is_current_stream_capturing": always(False),
        "synchronize": lambda _=None: ledger.host_waits("synchronize"),
        "empty_cache": always(None),
        "memory_allocated": lambda _=None: ledger.live_bytes,
        "max_memory_allocated": lambda _=None: ledger.peak_bytes,
        # The caching allocator's reserve is not modelled.
        "memory_reserved": lambda _=None: ledger.live_bytes,
        "max_memory_reserved": lambda _=None: ledger.peak_bytes,
        "reset_peak_memory_stats": lambda _=None: ledger.reset_peak(),
        "memory_stats": lambda _=None: {
            "allocated_bytes.all.current": ledger.live_bytes,
            "allocated_bytes.all.peak": ledger.peak_bytes,
            "num_ooms": 0,
            "num_alloc_retries": 0,
        },
        "mem_get_info": lambda _=None: (
            max(0, device.memory_bytes - ledger.live_bytes),
            device.memory_bytes,
        ),
        "manual_seed": always(None),
        "manual_seed_all": always(None),
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": always(None),
    }
