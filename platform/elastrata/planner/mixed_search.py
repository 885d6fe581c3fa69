"""All layouts of a model on a cluster of several kinds of devices, looked at one by one.

Without stages every rank has samples by its speed. With stages each lies on one kind, kind after
kind, the fastest first or last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from elastrata.core.model_spec import ModelSpec
from elastrata.core.parallelize import GradientSync
from elastrata.core.recomputation import Recomputation
from elastrata.planner.forecast import Forecast
from elastrata.planner.layout import MOST_SAMPLES, Layout
from elastrata.planner.memory import memory
from elastrata.planner.mixed import Kind, MixedStep, Part, mixed_step
from elastrata.planner.mixed_stages import kinds_of_stages, speeds_of_stages, staged_step
from elastrata.planner.search import family

_CHECKPOINTING: tuple[Recomputation, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class MixedForecast(Forecast):
    """The expectations of a layout on several kinds of devices."""

    parts: tuple[Part, ...]
    """Of each kind, in the order of ranks."""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    model: ModelSpec
    kinds: Sequence[Kind]
    batch_size: int
    steps: int

    @property
    def devices(self) -> int:
        return sum(kind.cluster.devices for kind in self.kinds)


def mixed_search(
    model: ModelSpec,
    kinds: Sequence[Kind],
    *,
    batch_size: int,
    steps: int,
    tensor_sizes: Sequence[int],
    in_stages: bool = True,
) -> tuple[MixedForecast, ...]:
    """Forecasts of the layouts that use all devices of all kinds and fit, the fastest first; the
    best of those that divide the model alike.

    Args:
        model: that is to be trained.
        kinds: of devices.
        batch_size: samples of a step.
        steps: of the run.
        tensor_sizes: into how many parts the model's matrices can be divided.
        in_stages: with stages, too.
    """
    at = _Setting(model=model, kinds=kinds, batch_size=batch_size, steps=steps)
    found = [*_dealt(at, tensor_sizes), *(_in_stages(at, tensor_sizes) if in_stages else ())]
    found.sort(key=lambda each: (each.time.total, each.memory.total))
    best: dict[tuple[int, ...], MixedForecast] = {}
    for each in found:
        best.setdefault(family(each.layout), each)
    return tuple(best.values())


def least_memory(
    model: ModelSpec, kind: Kind, kinds: Sequence[Kind], tensor_sizes: Sequence[int]
) -> float:
    """Bytes that a device of a kind needs at least where all kinds share the model, without stages.

    Args:
        model: that is to be trained.
        kind: one of the kinds.
        kinds: of devices.
        tensor_sizes: into how many parts the model's matrices can be divided.
    """
    at = _Setting(model=model, kinds=kinds, batch_size=1, steps=1)
    return min(
        memory(model, kind.cluster.device, kind.machine.stack, layout, 2 * layout.data).total
        for tensor in tensor_sizes
        if not any(other.cluster.per_node % tensor for other in kinds)
        for layout in _shapes(at, tensor, max(1, at.devices // tensor))
    )


def equal_hands(
    model: ModelSpec, kinds: Sequence[Kind], layout: Layout, batch_size: int
) -> float | None:
    """Tokens per second of a layout without stages if all ranks had equally many samples; None
    where that needs too much memory."""
    step = mixed_step(model, kinds, layout, batch_size, equal=True)
    return batch_size * model.seq_len / step.time.total if step else None


def _dealt(at: _Setting, tensor_sizes: Sequence[int]) -> Iterator[MixedForecast]:
    for tensor in tensor_sizes:
        if any(kind.cluster.devices % tensor for kind in at.kinds):
            continue
        if any(kind.cluster.per_node % tensor for kind in at.kinds):
            continue  # a tensor group lies in one node
        data = at.devices // tensor
        if data > at.batch_size:
            continue
        for layout in _shapes(at, tensor, data):
            step = mixed_step(at.model, at.kinds, layout, at.batch_size)
            if step:
                yield _forecast(at, at.kinds, layout, step)


def _shapes(at: _Setting, tensor: int, data: int) -> Iterator[Layout]:
    syncs: tuple[GradientSync, ...] = ("step", "micro_batch")
    for shards, sequence, checkpointing in product(
        _shard_counts(at.kinds, tensor, data), _tokens(tensor), _CHECKPOINTING
    ):
        for reshard, sync in product(
            (True, False) if shards > 1 else (True,), syncs if shards > 1 else ("step",)
        ):
            yield Layout(
                tensor=tensor,
                sequence=sequence,
                shards=shards,
                copies=data // shards,
                checkpointing=checkpointing,
                gradient_sync=sync,
                reshard=reshard,
            )


def _in_stages(at: _Setting, tensor_sizes: Sequence[int]) -> Iterator[MixedForecast]:
    fastest_first = sorted(at.kinds, key=lambda kind: -kind.cluster.device.peak_flops)
    for order in (fastest_first, fastest_first[::-1]):
        for stages in range(2, min(at.devices, at.model.layers) + 1):
            kinds = kinds_of_stages(order, stages)
            each = at.devices // stages
            for tensor in tensor_sizes if kinds else ():
                if each % tensor or any(k.cluster.per_node % tensor for k in order):
                    continue
                for layout in _staged_shapes(at, order, tensor, stages, each // tensor):
                    yield from _staged(at, order, kinds, layout)


def _staged_shapes(
    at: _Setting, kinds: Sequence[Kind], tensor: int, stages: int, data: int
) -> Iterator[Layout]:
    for shards, sequence, checkpointing in product(
        _shard_counts(kinds, tensor, data), _tokens(tensor), _CHECKPOINTING
    ):
        samples = 1
        while samples <= min(MOST_SAMPLES, at.batch_size // (data * stages)):
            for reshard in (True, False) if shards > 1 else (True,):
                yield Layout(
                    tensor=tensor,
                    sequence=sequence,
                    pipeline=stages,
                    shards=shards,
                    copies=data // shards,
                    micro_batch=samples,
                    checkpointing=checkpointing,
                    reshard=reshard,
                )
            samples *= 2


def _staged(
    at: _Setting, order: Sequence[Kind], kinds: Sequence[Kind], layout: Layout
) -> Iterator[MixedForecast]:
    """Cut by speed, and into equal stages: the one may fit where the other does not."""
    speeds = speeds_of_stages(at.model, kinds, layout)
    for cut in (speeds, None) if len(set(speeds)) > 1 else (None,):
        step = staged_step(at.model, kinds, layout, at.batch_size, cut)
        if step:
            yield _forecast(at, order, replace(layout, stage_speeds=cut or ()), step)


def _tokens(tensor: int) -> tuple[bool, ...]:
    return (False, True) if tensor > 1 else (False,)


def _shard_counts(kinds: Sequence[Kind], tensor: int, data: int) -> list[int]:
    """All data-parallel devices, one, or as many as lie in a node of every kind."""
    inside = [kind.cluster.per_node // tensor for kind in kinds]
    ranks = [kind.cluster.devices // tensor for kind in kinds]
    counts = {1, data}
    shards = 2
    while shards <= min(*inside, data - 1):
        if not any(number % shards for number in (*inside, *ranks, data)):
            counts.add(shards)
        shards *= 2
    return sorted(counts)


def _forecast(
    at: _Setting, order: Sequence[Kind], layout: Layout, step: MixedStep
) -> MixedForecast:
    seconds = step.time.total
    hours = at.steps * seconds / 3600
    prices = [kind.cluster.price for kind in at.kinds]
    hourly = sum((kind.cluster.price or 0.0) * kind.cluster.devices for kind in at.kinds)
    room = {kind.name: kind.cluster.device.memory_bytes for kind in at.kinds}
    fullest = max(step.parts, key=lambda part: part.memory.total / room[part.device])
    peak = sum(kind.cluster.devices * kind.cluster.device.peak_flops for kind in at.kinds)
    largest = max(part.micro_batch for part in step.parts)
    return MixedForecast(
        layout=replace(layout, micro_batch=max(1, round(largest))),
        memory=fullest.memory,
        time=step.time,
        tokens_per_second=at.batch_size * at.model.seq_len / seconds,
        mfu=at.model.flops_per_sample * at.batch_size / (seconds * peak),
        hours=hours,
        cost=None if None in prices else hourly * hours,
        parts=step.parts,
    )
