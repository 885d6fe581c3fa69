"""The figures of a rehearsal. The names of fields are keys of `elastrata rehearse --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastrata.rehearsal.ledger import Amount, Collective, Copy, Entries, Ledger, Wait


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
