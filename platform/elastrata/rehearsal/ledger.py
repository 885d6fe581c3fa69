"""The ledger of a rehearsed rank: messages, copies and waits by source line, and their figures."""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")


def current_line() -> tuple[str, str]:
    """Return the innermost line outside torch and Python's library, and its function.

    For example `step/train_step.py:83`. Returns torch's own line if it has no other caller, as in
    the threads of a backward pass.
    """
    # inspect.stack() would read the source of every frame, for each copy and wait.
    frame: FrameType | None = sys._getframe(1)
    torchs = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            torchs = torchs or frame
        elif not _is_standard_library(file) and not file.startswith(_HERE):
            return _line(frame)
        frame = frame.f_back
    return _line(torchs) if torchs else ("torch", "")


def _is_standard_library(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_PYTHON) and "site-packages" not in file)


def _line(frame: FrameType) -> tuple[str, str]:
    code, path = frame.f_code, Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}", code.co_name


@dataclass(kw_only=True)
class MessageFigures:
    """Collectives of one kind over one axis, in a step."""

    kind: str
    """Torch's name, such as `all_gather_into_tensor`."""
    axis: str
    """The mesh's name of the participating ranks, such as `shard`; `world` for all ranks."""
    ranks: int
    dtype: str
    device: str
    """cuda or cpu: the device of the tensors sent."""
    count: int = 0
    bytes: int = 0
    """Sum over the messages of the largest tensor sent or received."""


@dataclass(kw_only=True)
class CopyFigures:
    """Copies between host and device made by one source line."""

    direction: str
    """`to device` or `to host`."""
    line: str
    function: str
    pinned: bool
    """True if the host's memory is page-locked."""
    waits: bool
    """True if the host waits for the device. It does not for `non_blocking` copies between the
    device and page-locked memory."""
    count: int = 0
    bytes: int = 0


@dataclass(kw_only=True)
class WaitFigures:
    """Waits of the host for the device in one source line."""

    reason: str
    """`item`: reads a number. `copy to host`, `copy to device`: see `CopyFigures.waits`. `shape`:
    the shape of a result depends on values. Otherwise the function that waits."""
    line: str
    function: str
    count: int = 0


class Entries:
    """Events between two calls of `Ledger.take`."""

    def __init__(self) -> None:
        self.flops = 0
        """FLOPs of matrix products, convolutions and attention, by torch's formulas."""
        self._messages: dict[tuple[Any, ...], MessageFigures] = {}
        self._copies: dict[tuple[Any, ...], CopyFigures] = {}
        self._waits: dict[tuple[Any, ...], WaitFigures] = {}

    def add_message(self, size: int, **kind: Any) -> None:
        """Count a message; `kind` has the first fields of `MessageFigures`."""
        one = self._messages.setdefault(tuple(kind.values()), MessageFigures(**kind))
        one.count, one.bytes = one.count + 1, one.bytes + size

    def add_copy(self, size: int, **kind: Any) -> None:
        """Count a copy; `kind` has the first fields of `CopyFigures`."""
        one = self._copies.setdefault(tuple(kind.values()), CopyFigures(**kind))
        one.count, one.bytes = one.count + 1, one.bytes + size

    def add_wait(self, reason: str, line: str, function: str) -> None:
        """Count a wait."""
        wait = WaitFigures(reason=reason, line=line, function=function)
        self._waits.setdefault((reason, line, function), wait).count += 1

    @property
    def messages(self) -> list[MessageFigures]:
        """Messages by axis and kind."""
        made = self._messages.values()
        return sorted(made, key=lambda one: (one.axis, one.kind, one.dtype, one.device))

    @property
    def copies(self) -> list[CopyFigures]:
        """Copies, largest first."""
        made = self._copies.values()
        return sorted(made, key=lambda one: (-one.bytes, one.line, one.direction))

    @property
    def waits(self) -> list[WaitFigures]:
        """Waits by source line."""
        return sorted(self._waits.values(), key=lambda one: (one.line, one.reason))


class Ledger:
    """Entries and live device memory of a rank. Thread-safe."""

    def __init__(self) -> None:
        self.entries = Entries()
        self.groups: Counter[tuple[str, int]] = Counter()
        """Number of process groups created, by requested backend and number of ranks."""
        self.live_bytes = 0
        """Bytes of live tensors on the device."""
        self.peak_bytes = 0
        # Reentrant, because a finalizer may run in a thread that holds the lock.
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}

    def take(self) -> Entries:
        """Return the entries since the last call."""
        with self._lock:
            taken, self.entries = self.entries, Entries()
        return taken

    def reset_peak(self) -> None:
        """Restart the peak from the present live bytes."""
        self.peak_bytes = self.live_bytes

    def add_collective(self, size: int, **kind: Any) -> None:
        """Enter a message; `kind` has the first fields of `MessageFigures`."""
        with self._lock:
            self.entries.add_message(size, **kind)

    def copy(self, direction: str, size: int, *, pinned: bool, non_blocking: bool) -> None:
        """Enter a copy, `to device` or `to host`."""
        waits, (line, function) = not (pinned and non_blocking), current_line()
        with self._lock:
            self.entries.add_copy(
                size, direction=direction, line=line, function=function, pinned=pinned, waits=waits
            )
            if waits:
                self.entries.add_wait(f"copy {direction}", line, function)

    def host_waits(self, reason: str) -> None:
        """Enter a wait of the host for the device."""
        with self._lock:
            self.entries.add_wait(reason, *current_line())

    def group_figures(self) -> list[GroupFigures]:
        """Return the process groups created so far."""
        return [
            GroupFigures(backend=backend, ranks=ranks, count=count)
            for (backend, ranks), count in sorted(self.groups.items())
        ]

    def track_storages(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Count new device memory until it is freed."""
        for storage in storages:
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = 0
                # FakeTensor storages have no allocator whose frees could be counted.
                weakref.finalize(storage, self._release, key)
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a known storage."""
        key, size = storage._cdata, storage.nbytes()
        if (before := self._sizes.get(key)) is not None and before != size:
            with self._lock:
                self._sizes[key] = size
                self.live_bytes += size - before
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int) -> None:
        with self._lock:
            self.live_bytes -= self._sizes.pop(key)


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """Process groups created. Every rank takes part in creating each group, also those of other
    ranks."""

    backend: str
    ranks: int
    count: int


@dataclass(frozen=True, kw_only=True)
class SavingFigures:
    """The copy of the state for a checkpoint."""

    bytes: int
    tensors: int
    copies: Sequence[CopyFigures]
    waits: Sequence[WaitFigures]


@dataclass(frozen=True, kw_only=True)
class BuildFigures:
    """The model before its first step."""

    peak_bytes: int
    bytes: int
    """Bytes still allocated after the build."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """A rank's step."""

    rank: int
    parameters: int
    """Number of parameters of the model, or of its stages, of which the rank has a part."""
    micro_batches: int
    micro_batch_tokens: int
    """Tokens of the largest micro-batch."""
    build: BuildFigures
    peak_bytes: int
    """Largest number of bytes allocated at the same time."""
    memory: Mapping[str, int]
    """Bytes at the peak, by kind."""
    planned_bytes: float | None
    """Bytes at the peak by the plan, without the driver's share and the allocator's losses; null if
    the workload cannot be planned."""
    planned: Mapping[str, float] | None
    """Bytes by the plan's terms."""
    messages: Sequence[MessageFigures]
    groups: Sequence[GroupFigures]
    copies: Sequence[CopyFigures]
    waits: Sequence[WaitFigures]
    flops: int
    """Counted by torch in the operators of the step, recomputation included."""
    formula_flops: float
    """This rank's share by the workload's formula, from which the MFU is computed."""
    saving: SavingFigures
    seconds: float
    """Duration of the rehearsal."""


@dataclass(frozen=True, kw_only=True)
class GraphFigures:
    """Graphs that torch.compile makes of the blocks, over steps of varying lengths."""

    steps: int
    graphs: int
    """Number of different graphs after the last step."""
    breaks: int
    reasons: Sequence[str]
    """One line for each kind of break."""
    recompilations: int
    """Graphs compiled after the first step."""
    next_group: int
    """Graphs that the next group of workers compiled in the same processes, as after a fault."""
