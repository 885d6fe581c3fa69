"""`torch.cuda` of a rehearsal: a device with a name and a memory, which computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from elastrata.rehearsal.ledger import Ledger
from elastrata.rehearsal.streams import (
    FakeEvent,
    FakeStream,
    current_stream,
    default_stream,
    on_stream,
    set_stream,
)

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class FakeDevice:
    """A GPU as the driver describes it."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 80 * _GIB
    multiprocessors: int = 132
    per_node: int = 8

    @property
    def properties(self) -> SimpleNamespace:
        """As `torch.cuda.get_device_properties` has them."""
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
    """While it lasts, torch's queries are answered for a device, and waits go to a ledger.

    Memory that is allocated is that of the ledger's live tensors; nothing is reserved beside it.
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
        # Else it asks a driver whether to.
        always = property(lambda _: True)
        patches.enter_context(patch.object(FakeTensorMode, "avoid_device_init", always))
        yield


def _answers(device: FakeDevice, ledger: Ledger) -> Mapping[str, Any]:
    """What stands for each function of `torch.cuda`."""

    def always(value: object) -> Any:  # a new one each time: torch.compile has a table of them
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
