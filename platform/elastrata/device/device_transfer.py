"""Numbers between main memory and a device, without a wait of the host that nobody needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of main memory on `device`. For a GPU it is copied from pinned memory, and the host
    goes on meanwhile."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Readback:
    """Numbers on their way from a device into main memory: the host waits once for all of them, and
    not for what the device was asked for after them."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._numbers = numbers
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> list[float]:
        """The numbers, when they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self.read()

    def read(self) -> list[float]:
        """The numbers; for who has waited for something that the device was asked for later."""
        values: list[float] = self._numbers.tolist()
        return values


class DeviceSpan:
    """Seconds that a GPU takes for what it is asked for between two places; they are known once the
    host has waited for something behind them."""

    def __init__(self) -> None:
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self._first, self._last = event(enable_timing=True), event(enable_timing=True)
        self._first.record()

    def end(self) -> None:
        """The second place is here."""
        self._last.record()

    @property
    def seconds(self) -> float:
        """From the first place to the second."""
        return float(self._first.elapsed_time(self._last)) / 1000
