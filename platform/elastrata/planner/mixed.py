"""A step on several kinds of devices, dealt by speed: every kind has as many samples as it computes
in the time of all.

All ranks run equally many micro-batches, as their messages must match; those of a slower kind have
fewer samples, and none has more than its memory allows. Each kind lies in nodes of its
own, and a group that has several kinds is as fast as its slowest links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.block import Machine
from elastrata.planner.cluster import Cluster
from elastrata.planner.layout import MOST_SAMPLES, Layout
from elastrata.planner.memory import Memory, memory
from elastrata.planner.step_time import StepTime, step_time

_HALVINGS = 30
"""Of the time of a step, which is found to nine digits."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of device in a cluster of several."""

    cluster: Cluster
    machine: Machine

    @property
    def name(self) -> str:
        """Its device's."""
        return self.cluster.device.name


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a kind in a step. The field names are keys of `elastrata plan --json`."""

    device: str
    devices: int
    share: float
    """Of the step's samples; where stages are cut by speed, of the blocks."""
    micro_batch: float
    """Samples of a micro-batch, on average."""
    most: int
    """Samples of a micro-batch that it has memory for, a power of two."""
    blocks: tuple[int, ...]
    """Of each of its stages; empty where every device has all of them."""
    waiting: float
    """Share of the step in which it waits for other kinds."""
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class MixedStep:
    """A step on several kinds."""

    time: StepTime
    """Of the kind that sets the pace."""
    parts: tuple[Part, ...]


@dataclass
class _Hand:
    """The step of one kind by the samples that its ranks have."""

    model: ModelSpec
    kind: Kind
    most: int
    layout: Layout
    micro_batches: int
    times: dict[int, StepTime] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the kind."""
        return self.kind.cluster.devices // self.layout.tensor

    def time(self, micro_batch: float) -> StepTime:
        """Of micro-batches with so many samples on average: some have one more than others."""
        below = math.floor(micro_batch)
        return _between(self._whole(below), self._whole(below + 1), micro_batch - below)

    def micro_batch(self, seconds: float) -> float:
        """Samples of a micro-batch that make a step take so long, as far as there is memory."""
        if self._whole(self.most).total <= seconds:
            return float(self.most)
        low, high = 0, self.most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._whole(middle).total <= seconds else (low, middle)
        below, above = self._whole(low).total, self._whole(high).total
        return low + max(0.0, (seconds - below) / (above - below)) if above > below else float(low)

    def _whole(self, samples: int) -> StepTime:
        if samples not in self.times:
            self.times[samples] = self._computed(samples) if samples else self._messages()
        return self.times[samples]

    def _computed(self, samples: int) -> StepTime:
        batch = self.micro_batches * samples * self.layout.data
        layout = replace(self.layout, micro_batch=samples)
        return step_time(self.model, self.kind.cluster, self.kind.machine, layout, batch)

    def _messages(self) -> StepTime:
        """A step without samples: the messages are as ever, and nothing hides them."""
        machine = replace(self.kind.machine, stack=replace(self.kind.machine.stack, overlap=0.0))
        other = replace(self, kind=replace(self.kind, machine=machine), times={})
        nothing = dict.fromkeys(("matrices", "recomputation", "head", "tensor_messages"), 0.0)
        return replace(other._whole(1), **nothing)


def mixed_step(
    model: ModelSpec, kinds: Sequence[Kind], layout: Layout, batch_size: int, *, equal: bool = False
) -> MixedStep | None:
    """The fastest step of a layout without stages; None where a kind has too little memory.

    Args:
        model: that is trained.
        kinds: of devices, each with a whole number of tensor-parallel groups in every node.
        layout: of all devices together; its micro-batches do not count.
        batch_size: samples of a step.
        equal: all ranks have equally many samples, however fast they are.
    """
    seen = [replace(kind, cluster=_among(kind, kinds, layout.tensor)) for kind in kinds]
    best: MixedStep | None = None
    for count in _counts(model, seen, layout, batch_size):
        room = [_most(model, kind, layout, count) for kind in seen]
        hands = [_Hand(model, *both, layout, count) for both in zip(seen, room, strict=True)]
        step = _step(hands, batch_size, equal=equal) if all(room) else None
        if step and (best is None or step.time.total < best.time.total):
            best = step
    return best


def _step(hands: Sequence[_Hand], batch_size: int, *, equal: bool) -> MixedStep | None:
    ranks = sum(hand.ranks for hand in hands)
    each = batch_size / (ranks * hands[0].micro_batches)
    if equal:
        sizes = [each] * len(hands)
        if any(each > hand.most for hand in hands):
            return None
    else:
        sizes = _balanced(hands, batch_size)
    times = [hand.time(size) for hand, size in zip(hands, sizes, strict=True)]
    slowest = max(times, key=lambda time: time.total)
    parts = [
        Part(
            device=hand.kind.name,
            devices=hand.kind.cluster.devices,
            share=hand.ranks * hand.micro_batches * size / batch_size,
            micro_batch=size,
            most=hand.most,
            blocks=(),
            waiting=1 - time.total / slowest.total,
            memory=_memory(hand, size),
        )
        for hand, size, time in zip(hands, sizes, times, strict=True)
    ]
    return MixedStep(time=slowest, parts=tuple(parts))


def _balanced(hands: Sequence[_Hand], batch_size: int) -> list[float]:
    """Samples of each kind's micro-batches in the shortest step that has them all."""

    def samples(seconds: float) -> float:
        return sum(h.ranks * h.micro_batches * h.micro_batch(seconds) for h in hands)

    low, high = 0.0, max(hand.time(hand.most).total for hand in hands)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if samples(middle) >= batch_size else (middle, high)
    return [hand.micro_batch(high) for hand in hands]


def _counts(model: ModelSpec, kinds: Sequence[Kind], layout: Layout, batch_size: int) -> list[int]:
    """Micro-batches of a step: as few as there is memory for, and twice and four times as many."""
    most = [_most(model, kind, layout, 2) for kind in kinds]
    if not all(most):
        return []
    ranks = [kind.cluster.devices // layout.tensor for kind in kinds]
    room = sum(samples * number for samples, number in zip(most, ranks, strict=True))
    least = max(-(-batch_size // room), 2 if layout.gradient_sync == "micro_batch" else 1)
    return [n for n in (least, 2 * least, 4 * least) if n == least or n * sum(ranks) <= batch_size]


def _most(model: ModelSpec, kind: Kind, layout: Layout, micro_batches: int) -> int:
    """Samples of a micro-batch that fit a kind's memory, a power of two; 0 where none does."""
    samples = MOST_SAMPLES
    while samples:
        one = replace(layout, micro_batch=samples)
        batch = micro_batches * samples * layout.data
        needed = memory(model, kind.cluster.device, kind.machine.stack, one, batch)
        if needed.total <= kind.cluster.device.memory_bytes:
            return samples
        samples //= 2
    return 0


def _memory(hand: _Hand, size: float) -> Memory:
    samples = min(hand.most, max(1, math.ceil(size)))
    layout = replace(hand.layout, micro_batch=samples)
    batch = hand.micro_batches * samples * layout.data
    return memory(hand.model, hand.kind.cluster.device, hand.kind.machine.stack, layout, batch)


def _among(kind: Kind, kinds: Sequence[Kind], tensor: int) -> Cluster:
    """A kind's cluster as it is in rings with the other kinds: with as much of a network as the
    slowest node among them has."""
    own, slowest = kind.cluster, min(_bus(other.cluster, tensor) for other in kinds)
    beside = max(1, own.per_node // tensor)
    device = replace(own.device, network=min(own.device.network, slowest / beside))
    return replace(own, device=device)


def _bus(cluster: Cluster, tensor: int) -> float:
    beside = max(1, cluster.per_node // tensor)
    return min(cluster.device.link, beside * cluster.device.network)


def _between(first: StepTime, second: StepTime, place: float) -> StepTime:
    """A step between two others: 0 is the first, 1 the second."""
    values = {
        one.name: (1 - place) * getattr(first, one.name) + place * getattr(second, one.name)
        for one in fields(StepTime)
    }
    return StepTime(**values)
