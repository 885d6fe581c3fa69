"""The session of a rehearsal: one rank of any number, on a GPU that is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # noqa: F401  before functions of torch are replaced: it makes a table of them
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from elastrata.core import loop, parallelize
from elastrata.core.background import AtOnce
from elastrata.rehearsal.cuda import FakeDevice, fake_cuda
from elastrata.rehearsal.ledger import Ledger
from elastrata.rehearsal.ranks import fake_ranks
from elastrata.rehearsal.recorder import Recorder

DEVICE = FakeDevice()


@contextmanager
def rehearsal(
    device: FakeDevice = DEVICE, *, world_size: int | None = 1, rank: int = 0
) -> Iterator[Ledger]:
    """While it lasts, tensors have shapes and no numbers, in all threads that are started, and
    `torch.device("cuda")` is there.

    Needs `load_shim` before torch is imported.

    Args:
        device: that every rank has.
        world_size: ranks of the default process group; None: it is not there.
        rank: that this process plays.

    Yields:
        What the device would have been asked for.
    """
    ledger = Ledger()
    with fake_cuda(device, ledger), fake_ranks(ledger, world_size, rank) as axes, ExitStack() as on:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        recorder = Recorder(fake, ledger, axes)
        modes = fake, recorder
        on.enter_context(patch.object(threading.Thread, "run", _run_with(modes)))
        on.enter_context(patch.object(parallelize, "nodes_of_all", _nodes_of(device)))
        on.enter_context(patch.object(torch.UntypedStorage, "resize_", _resize(ledger)))
        on.enter_context(patch.object(FakeTensor, "tolist", _tolist(recorder)))
        # Threads take turns in a fake mode, and torch's is not made for that.
        on.enter_context(patch.object(loop, "BackgroundThread", lambda _: AtOnce()))
        for mode in modes:
            on.enter_context(mode)
        yield ledger


def _nodes_of(device: FakeDevice) -> Callable[[], list[object]]:
    """`nodes_of_all` of ranks that lie on full nodes, one after the other."""
    return lambda: [rank // device.per_node for rank in range(dist.get_world_size())]


def _run_with(modes: tuple[Any, ...]) -> Callable[[threading.Thread], None]:
    """`Thread.run` in these modes: a thread begins without those of the one that starts it."""
    run = threading.Thread.run

    def run_with(thread: threading.Thread) -> None:
        with ExitStack() as on:
            for mode in modes:
                on.enter_context(mode)
            run(thread)

    return run_with


def _resize(ledger: Ledger) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    """`UntypedStorage.resize_`, which FSDP2 frees and gets memory with."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resized: torch.UntypedStorage = resize(storage, size)
        ledger.resized(storage)
        return resized

    return resize_


def _tolist(recorder: Recorder) -> Callable[[FakeTensor], Any]:
    """`Tensor.tolist`, which reads the device once, whatever the number of numbers; numbers of the
    host that are unknown, too, are made in one go."""
    by_number: Any = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.is_cuda or tensor.constant is None:
            return recorder.tolist(tensor)
        return by_number(tensor)

    return tolist
