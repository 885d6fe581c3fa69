"""The ledger of a rehearsed rank: messages, copies and waits by line, and their figures."""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Line:
    """A line of a program."""

    file: str
    """With the name of its folder, such as `core/step.py`."""
    number: int
    function: str

    @property
    def place(self) -> str:
        """As compilers say it, such as `core/step.py:83`."""
        return f"{self.file}:{self.number}" if self.number else self.file


def current_line() -> Line:
    """The innermost line that is neither torch's nor Python's; torch's own where it has no caller,
    as in the threads of a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    torchs = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            torchs = torchs or frame
        elif not _is_pythons(file) and not file.startswith(_HERE):
            return _line(frame)
        frame = frame.f_back
    return _line(torchs) if torchs else Line("torch", 0, "")


def _is_pythons(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_PYTHON) and "site-packages" not in file)


def _line(frame: FrameType) -> Line:
    code, path = frame.f_code, Path(frame.f_code.co_filename)
    return Line(f"{path.parent.name}/{path.name}", frame.f_lineno, code.co_name)


@dataclass(frozen=True)
class Collective:
    """A kind of message between ranks."""

    kind: str
    """As torch calls it, such as `all_gather_into_tensor`."""
    axis: str
    """The mesh's name for the ranks that take part, such as `shard`; `world` for all of them."""
    ranks: int
    """So many take part."""
    dtype: str
    device: str
    """cuda or cpu: of the numbers that are sent."""


@dataclass(frozen=True)
class Copy:
    """A place of copies between host and device."""

    direction: str
    """`to device` or `to host`."""
    line: Line
    pinned: bool
    """Whether the host's memory is page-locked."""
    waits: bool
    """Whether the host waits for the device: of all copies, those that are `non_blocking` between
    the device and page-locked memory alone let it go on."""


@dataclass(frozen=True)
class Wait:
    """A place where the host waits for the device."""

    reason: str
    """`item`: reads a number. `copy to host`, `copy to device`: see `Copy.waits`. `shape`: the
    size of a result depends on numbers. Else the function that waits."""
    line: Line


@dataclass
class Amount:
    """How often, and how many bytes in all."""

    count: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """One more, of so many bytes."""
        self.count += 1
        self.bytes += size


@dataclass
class Entries:
    """All that happened between two looks at a ledger."""

    collectives: dict[Collective, Amount] = field(default_factory=dict)
    """Bytes: of the largest tensor that is given or received."""
    copies: dict[Copy, Amount] = field(default_factory=dict)
    waits: Counter[Wait] = field(default_factory=Counter)
    flops: int = 0
    """Of matrix products, convolutions and attention, by torch's formulas."""


class Ledger:
    """Entries, and the device's live bytes. Threads may share it."""

    def __init__(self) -> None:
        self.entries = Entries()
        self.groups: Counter[tuple[str, int]] = Counter()
        """Process groups that were made: by the backend that was asked for, and its ranks."""
        self.live_bytes = 0
        """Of tensors on the device."""
        self.peak_bytes = 0
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}

    def take(self) -> Entries:
        """The entries since the last call."""
        with self._lock:
            taken, self.entries = self.entries, Entries()
        return taken

    def reset_peak(self) -> None:
        """The peak counts from here."""
        self.peak_bytes = self.live_bytes

    def collective(self, collective: Collective, size: int) -> None:
        """A message of so many bytes."""
        with self._lock:
            self.entries.collectives.setdefault(collective, Amount()).add(size)

    def copy(self, direction: str, size: int, *, pinned: bool, non_blocking: bool) -> None:
        """A copy of so many bytes, `to device` or `to host`."""
        waits, line = not (pinned and non_blocking), current_line()
        with self._lock:
            copy = Copy(direction, line, pinned, waits)
            self.entries.copies.setdefault(copy, Amount()).add(size)
            if waits:
                self.entries.waits[Wait(f"copy {direction}", line)] += 1

    def flops(self, number: int) -> None:
        """An operator of so many."""
        self.entries.flops += number

    def host_waits(self, reason: str) -> None:
        """The host waits for the device."""
        with self._lock:
            self.entries.waits[Wait(reason, current_line())] += 1

    def sees(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Counts memory of the device that is new, until it is freed."""
        for storage in storages:
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = 0
                weakref.finalize(storage, self._freed, key)
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that was seen may have another size now."""
        key, size = storage._cdata, storage.nbytes()
        if (before := self._sizes.get(key)) is not None and before != size:
            with self._lock:
                self._sizes[key] = size
                self.live_bytes += size - before
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int) -> None:
        with self._lock:
            self.live_bytes -= self._sizes.pop(key)


@dataclass(frozen=True, kw_only=True)
class MessageFigures:
    """Collectives of one kind over one axis, in a step."""

    kind: str
    axis: str
    ranks: int
    dtype: str
    device: str
    count: int
    bytes: int
    """Of the largest tensor that is given or received, over all of them."""


@dataclass(frozen=True, kw_only=True)
class CopyFigures:
    """Copies between host and device of one line."""

    direction: str
    line: str
    function: str
    pinned: bool
    waits: bool
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class WaitFigures:
    """Waits of the host for the device in one line."""

    reason: str
    line: str
    function: str
    count: int


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """Process groups that were made: every rank takes part in making each, also of other ranks."""

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
    """That stay."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """A rank's step."""

    rank: int
    parameters: int
    """Numbers of the model, or of its stages, of which the rank has a part."""
    micro_batches: int
    micro_batch_tokens: int
    """Of the largest."""
    build: BuildFigures
    peak_bytes: int
    """Allocated at once."""
    memory: Mapping[str, int]
    """Bytes at the peak, by kind."""
    planned_bytes: float | None
    """Likewise by the plan, without what the driver keeps and the allocator loses; null where a
    workload cannot be planned."""
    planned: Mapping[str, float] | None
    """By the plan's terms."""
    messages: Sequence[MessageFigures]
    groups: Sequence[GroupFigures]
    copies: Sequence[CopyFigures]
    waits: Sequence[WaitFigures]
    flops: int
    """Counted by torch in the operators of the step, recomputation included."""
    formula_flops: float
    """This rank's share by the workload's formula, which the MFU is computed from."""
    saving: SavingFigures
    seconds: float
    """That the rehearsal took."""


@dataclass(frozen=True, kw_only=True)
class GraphFigures:
    """What torch.compile makes of the blocks, over steps of varying lengths."""

    steps: int
    graphs: int
    """Different ones after the last step."""
    breaks: int
    reasons: Sequence[str]
    """A line for each kind of break."""
    recompilations: int
    """Graphs that were made after the first step."""
    next_group: int
    """Graphs that the next group of workers made in the same processes, as after a fault."""


def messages(entries: Entries) -> list[MessageFigures]:
    """Those of a step, in a fixed order."""

    def figures(message: Collective, amount: Amount) -> MessageFigures:
        return MessageFigures(**vars(message), **vars(amount))

    made = [figures(message, amount) for message, amount in entries.collectives.items()]
    return sorted(made, key=lambda one: (one.axis, one.kind, one.dtype, one.device))


def copies(entries: Entries) -> list[CopyFigures]:
    """Those of a step, largest first."""

    def figures(copy: Copy, amount: Amount) -> CopyFigures:
        return CopyFigures(
            direction=copy.direction,
            line=copy.line.place,
            function=copy.line.function,
            pinned=copy.pinned,
            waits=copy.waits,
            **vars(amount),
        )

    made = [figures(copy, amount) for copy, amount in entries.copies.items()]
    return sorted(made, key=lambda one: (-one.bytes, one.line, one.direction))


def waits(entries: Entries) -> list[WaitFigures]:
    """Those of a step, by line."""

    def figures(wait: Wait, count: int) -> WaitFigures:
        line = wait.line
        return WaitFigures(reason=wait.reason, line=line.place, function=line.function, count=count)

    made = [figures(wait, count) for wait, count in entries.waits.items()]
    return sorted(made, key=lambda one: (one.line, one.reason))


def groups(ledger: Ledger) -> list[GroupFigures]:
    """Those that were made so far."""
    return [
        GroupFigures(backend=backend, ranks=ranks, count=count)
        for (backend, ranks), count in sorted(ledger.groups.items())
    ]
