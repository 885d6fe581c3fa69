"""Compute time: the seconds of a rank's passes, without the time it waits for other ranks."""

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

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class ComputeTime(Protocol):
    """Measures the compute time of the passes of every step."""

    def begin(self) -> None:
        """Start measuring the passes of a step."""

    def effort(self, work: float) -> Effort:
        """Return the rank's effort in the newest step whose measurement is available."""

    def close(self) -> None:
        """Stop measuring and release all resources."""


def build_compute_time(device: torch.device, blocks: Sequence[nn.Module]) -> ComputeTime:
    """Return the measurement for a rank on `device` whose model has these blocks.

    Without blocks, it measures the thread's time on a CPU, and nothing on a GPU.
    """
    if device.type == "cpu":
        return BlockTime(blocks, ClockSpan) if blocks else ThreadTime()
    # Blocks are alike: the first one is enough to compare ranks.
    return BlockTime(blocks[:1], DeviceSpan, is_late=True)


class ThreadTime(ComputeTime):
    """Measures the seconds of the thread that creates it.

    On Linux it counts the time on a CPU and the time that the thread was runnable while another
    thread ran. On other systems it counts the time on a CPU only.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY)
        except OSError:
            self._clock: Callable[[], float] = time.thread_time
        else:
            self._clock = self._read_scheduler
        self._begin_seconds = 0.0

    @override
    def begin(self) -> None:
        self._begin_seconds = self._clock()

    @override
    def effort(self, work: float) -> Effort:
        return Effort(self._clock() - self._begin_seconds, work)

    @override
    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            # A late measurement must not read the closed file.
            self._file, self._clock = None, time.thread_time

    def _read_scheduler(self) -> float:
        assert self._file is not None
        # A thread that waits for other ranks sleeps, and sleep is in neither number. Some kernels
        # also leave out the time that a CPU quota takes.
        on_cpu, waiting, _ = os.pread(self._file, 100, 0).split()
        return (int(on_cpu) + int(waiting)) / 1e9


class Span(Protocol):
    """An interval that begins when the object is created."""

    def end(self) -> None:
        """End the interval."""

    @property
    def seconds(self) -> float:
        """Length of the interval."""


class ClockSpan(Span):
    """An interval of wall-clock time."""

    def __init__(self) -> None:
        self._begin_seconds = self._end_seconds = time.perf_counter()

    @override
    def end(self) -> None:
        self._end_seconds = time.perf_counter()

    @property
    @override
    def seconds(self) -> float:
        return self._end_seconds - self._begin_seconds


class BlockTime(ComputeTime):
    """Measures the seconds of the blocks' forward passes, once their parameters are gathered.

    Nothing inside of a block waits for ranks with other samples, and everything that slows a rank's
    computation counts.

    Args:
        blocks: blocks of the model to measure; empty: measures nothing.
        span: creates the interval of one forward pass.
        is_late: whether to read intervals one step later, when a GPU has finished them.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], span: Callable[[], Span], *, is_late: bool = False
    ) -> None:
        self._span, self._is_late = span, is_late
        self._spans: list[Span] = []
        self._previous_effort = Effort(0.0, 0.0)
        self._work = 0.0
        self._hooks = [hook for block in blocks for hook in self._register_hooks(block)]

    @override
    def begin(self) -> None:
        # The host is ahead of the GPU: only the intervals of the previous step are certain to be
        # complete.
        self._previous_effort = self._sum() if self._is_late else self._previous_effort
        self._spans = []

    @override
    def effort(self, work: float) -> Effort:
        self._work = work
        return self._previous_effort if self._is_late else self._sum()

    def _sum(self) -> Effort:
        return Effort(sum(span.seconds for span in self._spans), self._work)

    @override
    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _register_hooks(self, block: nn.Module) -> Sequence[RemovableHandle]:
        return (
            block.register_forward_pre_hook(self._start_span),
            block.register_forward_hook(self._end_span),
        )

    def _start_span(self, block: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():  # not in evaluations
            self._spans.append(self._span())

    def _end_span(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self._spans:
            self._spans[-1].end()
