"""Own time: the seconds that a rank itself takes for its passes, without those that it waits for
other ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from elastrata.device.device_transfer import DeviceSpan
from elastrata.step.step_message import Effort

_SCHEDULER = Path("/proc/thread-self/schedstat")


class OwnTime(Protocol):
    """Measures the passes of every step."""

    def begin(self) -> None:
        """The passes of a step begin."""

    def effort(self, work: float) -> Effort:
        """The rank's share in the passes of the newest step that is measured by now."""

    def close(self) -> None:
        """Nothing more is measured."""


def own_time(device: torch.device, blocks: Sequence[nn.Module]) -> OwnTime:
    """Of a rank on that device, whose model has these blocks; without any, that of the thread on a
    CPU, and nothing on a GPU."""
    if device.type == "cpu":
        return BlockTime(blocks, ClockSpan) if blocks else ThreadTime()
    return BlockTime(blocks[:1], DeviceSpan, is_late=True)


class ThreadTime(OwnTime):
    """Seconds of the thread that this is made in.

    On Linux those on a CPU, and those in which the thread could have run and another one did. A
    thread that waits for other ranks sleeps, which counts in neither; nor does, with some kernels,
    the time that a quota takes. Elsewhere those on a CPU alone.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(_SCHEDULER, os.O_RDONLY)
        except OSError:
            self._clock: Callable[[], float] = time.thread_time
        else:
            self._clock = self._by_scheduler
        self._began = 0.0

    @override
    def begin(self) -> None:
        self._began = self._clock()

    @override
    def effort(self, work: float) -> Effort:
        return Effort(self._clock() - self._began, work)

    @override
    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file, self._clock = None, time.thread_time

    def _by_scheduler(self) -> float:
        assert self._file is not None
        on_cpu, waiting, _ = os.pread(self._file, 100, 0).split()
        return (int(on_cpu) + int(waiting)) / 1e9


class Span(Protocol):
    """Begins when it is made."""

    def end(self) -> None:
        """It ends here."""

    @property
    def seconds(self) -> float:
        """From its begin to its end."""


class ClockSpan(Span):
    """Seconds by the clock."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    @override
    def end(self) -> None:
        self._ended = time.perf_counter()

    @property
    @override
    def seconds(self) -> float:
        return self._ended - self._began


class BlockTime(OwnTime):
    """Seconds in the forward passes of blocks, after their parameters have come: nothing in there
    waits for ranks of other samples, and whatever keeps a rank from computing counts.

    Args:
        blocks: of the model; none: nothing is measured.
        span: measures one pass.
        is_late: whether spans are read a step later, when a GPU has done them.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], span: Callable[[], Span], *, is_late: bool = False
    ) -> None:
        self._span, self._is_late = span, is_late
        self._spans: list[Span] = []
        self._before = Effort(0.0, 0.0)
        self._work = 0.0
        self._hooks = [hook for block in blocks for hook in self._hooked(block)]

    @override
    def begin(self) -> None:
        self._before = self._sum() if self._is_late else self._before
        self._spans = []

    @override
    def effort(self, work: float) -> Effort:
        self._work = work
        return self._before if self._is_late else self._sum()

    def _sum(self) -> Effort:
        return Effort(sum(span.seconds for span in self._spans), self._work)

    @override
    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hooked(self, block: nn.Module) -> Sequence[RemovableHandle]:
        return (
            block.register_forward_pre_hook(self._enter),
            block.register_forward_hook(self._leave),
        )

    def _enter(self, block: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._spans.append(self._span())

    def _leave(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self._spans:
            self._spans[-1].end()
