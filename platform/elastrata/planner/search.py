"""All layouts of a model on a cluster, looked at one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from elastrata.core.model_spec import ModelSpec
from elastrata.core.parallelize import GradientSync, Schedule
from elastrata.core.recomputation import Recomputation
from elastrata.planner.block import Machine
from elastrata.planner.cluster import Cluster
from elastrata.planner.forecast import Forecast, forecast
from elastrata.planner.layout import MOST_SAMPLES, Layout
from elastrata.planner.memory import memory
from elastrata.planner.step_time import step_time

_MOST_PARTS = 8
"""Most parts of the model on one device of a pipeline."""
_CHECKPOINTING: tuple[Recomputation, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """The layout that is nearest to fitting."""

    layout: Layout
    needed: float
    """Bytes."""
    missing: float
    """Bytes beyond the device's."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    forecasts: tuple[Forecast, ...]
    """Forecasts of the layouts that fit, the fastest first; maybe none."""
    too_large: int
    """Layouts that do not fit."""
    nearest: Misfit | None
    """None where there was nothing that does not fit."""

    @property
    def families(self) -> tuple[Forecast, ...]:
        """The best of all layouts that divide the model alike."""
        best: dict[tuple[int, ...], Forecast] = {}
        for each in self.forecasts:
            best.setdefault(family(each.layout), each)
        return tuple(best.values())


def family(layout: Layout) -> tuple[int, ...]:
    """The sizes of a layout that say how devices divide the model."""
    return layout.tensor, layout.pipeline, layout.copies, layout.shards


def search(
    model: ModelSpec,
    cluster: Cluster,
    machine: Machine,
    *,
    batch_size: int,
    steps: int,
    tensor_sizes: Sequence[int],
    pipelines: bool = True,
) -> SearchResult:
    """Looks at every layout that uses all devices.

    Args:
        model: that is to be trained.
        cluster: that it is to be trained on.
        machine: the cluster's device, and the system.
        batch_size: samples of a step.
        steps: of the run.
        tensor_sizes: into how many parts the model's matrices can be divided.
        pipelines: whether models may be cut into stages.
    """
    fitting, too_large, nearest = list[Forecast](), 0, None
    for shape in _shapes(model, cluster.devices, cluster.per_node, tensor_sizes, pipelines):
        for layout in _micro_batched(shape, batch_size):
            needed = memory(model, cluster.device, machine.stack, layout, batch_size)
            missing = needed.total - cluster.device.memory_bytes
            if missing > 0:
                too_large += 1
                if nearest is None or missing < nearest.missing:
                    nearest = Misfit(layout=layout, needed=needed.total, missing=missing)
                break  # a larger micro-batch needs more
            time = step_time(model, cluster, machine, layout, batch_size)
            fitting.append(
                forecast(model, cluster, layout, needed, time, batch_size=batch_size, steps=steps)
            )
    fitting.sort(key=lambda each: (each.time.total, each.memory.total))
    return SearchResult(forecasts=tuple(fitting), too_large=too_large, nearest=nearest)


def _micro_batched(shape: Layout, batch_size: int) -> Iterator[Layout]:
    """Micro-batches of 1, 2, 4... samples, as far as the batch has so many for each rank; several
    of them, where gradients are summed after each."""
    samples, least = 1, 2 if shape.gradient_sync == "micro_batch" else 1
    while samples <= min(MOST_SAMPLES, -(-batch_size // shape.data)):
        layout = replace(shape, micro_batch=samples)
        if layout.micro_batches(batch_size) >= least:
            yield layout
        samples *= 2


def _shapes(
    model: ModelSpec,
    devices: int,
    per_node: int,
    tensor_sizes: Sequence[int],
    pipelines: bool,
) -> Iterator[Layout]:
    """Layouts with micro-batches of one sample."""
    for tensor in tensor_sizes:
        if devices % tensor or tensor > per_node:
            continue  # such devices talk in every block: they belong on one node
        for stages, parts, schedule in _stages(model.layers, devices // tensor, pipelines):
            data = devices // tensor // stages
            for shards, sequence, checkpointing in product(
                _shard_counts(data, tensor, per_node),
                (False, True) if tensor > 1 else (False,),
                _CHECKPOINTING,
            ):
                if schedule == "zero_bubble" and checkpointing == "selective":
                    continue  # what it keeps is there for one backward pass, not for its two parts
                syncs: tuple[GradientSync, ...] = ("step", "micro_batch")
                for reshard, sync in product(
                    (True, False) if shards > 1 else (True,),
                    syncs if shards > 1 and stages == 1 else ("step",),
                ):
                    yield Layout(
                        tensor=tensor,
                        sequence=sequence,
                        pipeline=stages,
                        virtual_stages=parts,
                        schedule=schedule,
                        shards=shards,
                        copies=data // shards,
                        checkpointing=checkpointing,
                        gradient_sync=sync,
                        reshard=reshard,
                    )


def _stages(layers: int, devices: int, pipelines: bool) -> Iterator[tuple[int, int, Schedule]]:
    """Numbers of stages, of parts on each, and their schedule."""
    yield 1, 1, "1f1b"
    for stages in _divisors(devices) if pipelines else ():
        if not 1 < stages <= layers:
            continue
        yield stages, 1, "1f1b"
        yield stages, 1, "zero_bubble"
        if layers % stages == 0:
            for parts in _divisors(layers // stages):
                if 1 < parts <= _MOST_PARTS:
                    yield stages, parts, "interleaved_1f1b"


def _shard_counts(data: int, tensor: int, per_node: int) -> list[int]:
    """All data-parallel devices, those of a node, those of two, four... nodes, or one."""
    inside = max(1, per_node // tensor)
    counts = {1, data}
    while inside < data:
        if data % inside == 0:
            counts.add(inside)
        inside *= 2
    return sorted(counts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
