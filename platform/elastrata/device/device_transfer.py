"""Transfers between main memory and a device, without unnecessary waits of the host."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import torch
from torch import Tensor

collectives_aborted = Event()
"""Set before the collectives of this process's group are aborted; cleared by the next group."""


class AbortedError(Exception):
    """A peer has failed, and the collectives of this process's group were aborted."""


def raise_if_aborted() -> None:
    """Reject results that an aborted collective may have written.

    Raises:
        AbortedError: the collectives of this process's group were aborted.
    """
    # NCCL stops the kernels of an aborted collective at any point, and the stream continues: the
    # tensor then holds any mix of input, partial sums and old memory, and no call has failed. The
    # flag is set before the abort, so every value that is read after the abort is rejected.
    if collectives_aborted.is_set():
        raise AbortedError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of main memory on `device`, without a wait of the host."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # Only copies from pinned memory are asynchronous.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Readback:
    """An asynchronous copy of numbers from a device into main memory."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._numbers = numbers
            return
        # Pinned, as only such copies are asynchronous.
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        # The host waits for this event only, and not for work that the device receives later.
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> list[float]:
        """Wait for the copy and return the numbers.

        Raises:
            AbortedError: the collectives of this process's group were aborted.
        """
        if self._event is not None:
            self._event.synchronize()
        return self.read()

    def read(self) -> list[float]:
        """Return the numbers without a wait.

        The caller must have waited for later work on the device.

        Raises:
            AbortedError: the collectives of this process's group were aborted.
        """
        raise_if_aborted()
        values: list[float] = self._numbers.tolist()
        return values


class DeviceSpan:
    """Seconds of the device's work between the creation of the object and `end`.

    They are available once the host has waited for later work.
    """

    def __init__(self) -> None:
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self._first, self._last = event(enable_timing=True), event(enable_timing=True)
        self._first.record()

    def end(self) -> None:
        """Mark the end of the interval."""
        self._last.record()

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return float(self._first.elapsed_time(self._last)) / 1000
