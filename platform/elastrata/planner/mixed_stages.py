"""A step in stages on several kinds of devices: every stage on one kind, cut by speed, so that a
slower device has fewer blocks. Between kinds there are hidden states only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from elastrata.core.model_spec import ModelSpec
from elastrata.core.pipeline.spans import stage_spans
from elastrata.planner.block import again_seconds, block_passes
from elastrata.planner.layout import Layout
from elastrata.planner.memory import Memory, stage_memory
from elastrata.planner.mixed import Kind, MixedStep, Part
from elastrata.planner.operations import neighbour_seconds
from elastrata.planner.stage import Stage
from elastrata.planner.step_time import StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """The setting that every stage depends on."""

    model: ModelSpec
    kinds: Sequence[Kind]
    """Of each stage."""
    layout: Layout
    batch_size: int
    blocks: Sequence[int]
    """Of each stage."""

    @property
    def micro_batches(self) -> int:
        return self.layout.micro_batches(self.batch_size)

    def model_of(self, stage: int) -> ModelSpec:
        """A model of which an equal part has as many blocks as a stage."""
        return replace(self.model, layers=self.blocks[stage] * self.layout.pipeline)


def kinds_of_stages(kinds: Sequence[Kind], stages: int) -> list[Kind]:
    """The kind of each stage where devices follow each other kind by kind; empty where a stage
    would have devices of two kinds."""
    devices = sum(kind.cluster.devices for kind in kinds)
    if devices % stages:
        return []
    each = devices // stages
    if any(kind.cluster.devices % each for kind in kinds):
        return []
    return [kind for kind in kinds for _ in range(kind.cluster.devices // each)]


def speeds_of_stages(model: ModelSpec, kinds: Sequence[Kind], layout: Layout) -> tuple[float, ...]:
    """How fast the device of each stage computes a block, beside the fastest; three digits."""
    seconds = [_block_seconds(model, kind, layout) for kind in kinds]
    return tuple(round(min(seconds) / own, 3) for own in seconds)


def staged_step(
    model: ModelSpec,
    kinds: Sequence[Kind],
    layout: Layout,
    batch_size: int,
    speeds: Sequence[float] | None,
) -> MixedStep | None:
    """A step in stages with 1F1B; None where a stage needs more memory than its devices have.

    Args:
        model: that is trained.
        kinds: of each stage.
        layout: of all devices together, with one stage on each.
        batch_size: samples of a step.
        speeds: of each stage, by which the blocks are cut; None: as if all were equally fast.
    """
    blocks = _cut(tuple(model.block_flops), layout.pipeline, tuple(speeds or ()))
    at = _Setting(model=model, kinds=kinds, layout=layout, batch_size=batch_size, blocks=blocks)
    stages = range(layout.pipeline)
    needs = [_memory(at, stage) for stage in stages]
    rooms = [kind.cluster.device.memory_bytes for kind in kinds]
    if any(need.total > room for need, room in zip(needs, rooms, strict=True)):
        return None
    alone = [_alone(at, stage) for stage in stages]
    passed = [_busy(time) / at.micro_batches for time in alone]
    times = [
        replace(time, bubble=sum(passed) - own) for time, own in zip(alone, passed, strict=True)
    ]
    slowest = max(times, key=lambda time: time.total)
    return MixedStep(time=slowest, parts=_parts(at, needs, times, slowest))


def _parts(
    at: _Setting, needs: Sequence[Memory], times: Sequence[StepTime], slowest: StepTime
) -> tuple[Part, ...]:
    parts = []
    for kind in dict.fromkeys(at.kinds):
        own = [stage for stage, other in enumerate(at.kinds) if other == kind]
        blocks = tuple(at.blocks[stage] for stage in own)
        parts.append(
            Part(
                device=kind.name,
                devices=kind.cluster.devices,
                share=sum(blocks) / at.model.layers,
                micro_batch=float(at.layout.micro_batch),
                most=at.layout.micro_batch,
                blocks=blocks,
                waiting=1 - max(_busy(times[stage]) for stage in own) / _busy(slowest),
                memory=max((needs[stage] for stage in own), key=lambda need: need.total),
            )
        )
    return tuple(parts)


def _alone(at: _Setting, stage: int) -> StepTime:
    """The step of one stage as if no other were slower."""
    kind = at.kinds[stage]
    time = step_time(at.model_of(stage), kind.cluster, kind.machine, at.layout, at.batch_size)
    is_last = stage == at.layout.pipeline - 1
    messages = at.micro_batches * _neighbour_seconds(at, stage)
    return replace(time, head=time.head if is_last else 0.0, pipeline_messages=messages)


def _neighbour_seconds(at: _Setting, stage: int) -> float:
    """Hidden states and their gradients to and from the slower neighbour."""
    kind = at.kinds[stage]
    beside = at.kinds[max(0, stage - 1) : stage + 2]
    network = min(other.cluster.device.network for other in beside)
    cluster = replace(kind.cluster, device=replace(kind.cluster.device, network=network))
    tokens = at.layout.micro_batch * at.model.seq_len
    hidden = float(tokens * at.model.hidden * kind.machine.stack.element_bytes)
    stride = at.layout.tensor * at.layout.data
    once = neighbour_seconds(cluster, kind.machine.messages, hidden, at.layout.tensor, stride)
    return 2 * once


@cache
def _cut(costs: tuple[int, ...], stages: int, speeds: tuple[float, ...]) -> list[int]:
    return [len(span) for span in stage_spans(costs, stages, speeds)]


def _busy(time: StepTime) -> float:
    return time.matrices + time.recomputation + time.head + time.tensor_messages


def _memory(at: _Setting, stage: int) -> Memory:
    model, kind = at.model_of(stage), at.kinds[stage]
    is_last = stage == at.layout.pipeline - 1
    numbers = at.blocks[stage] * model.block_parameters
    numbers += model.embedding_parameters if stage == 0 else 0
    if is_last:
        numbers += model.vocabulary * model.hidden + model.head_extra + model.sample_extra
    part = Stage(
        model=model,
        stack=kind.machine.stack,
        layout=at.layout,
        batch_size=at.batch_size,
        numbers=float(numbers),
        number=stage,
        has_head=is_last,
    )
    return stage_memory(part, kind.cluster.device)


def _block_seconds(model: ModelSpec, kind: Kind, layout: Layout) -> float:
    shape = (layout.micro_batch, layout.tensor, layout.sequence and layout.tensor > 1)
    passes = block_passes(model, kind.machine, *shape)
    again = again_seconds(model, kind.machine, *shape, layout.checkpointing)
    return passes.forward + passes.backward + again
