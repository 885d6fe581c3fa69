"""A step in stages on several kinds of devices: every stage on one kind, cut by speed, so that a
slower device has fewer blocks. Between kinds there are hidden states only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.block import again_seconds, block_passes
from elastrata.planner.layout import Layout
from elastrata.planner.memory import Memory, stage_memory
from elastrata.planner.mixed import Kind, MixedStep, Part
from elastrata.planner.operations import neighbour_seconds
from elastrata.planner.stage import Stage, blocks_of_stages
from elastrata.planner.step_time import StepTime, stage_time


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
    cut = replace(layout, stage_speeds=tuple(speeds or ()))
    blocks = blocks_of_stages(model, kinds[0].machine.stack, cut)
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
    time = stage_time(
        at.model,
        kind.cluster,
        kind.machine,
        at.layout,
        at.batch_size,
        blocks=at.blocks[stage],
        has_head=stage == at.layout.pipeline - 1,
    )
    return replace(time, pipeline_messages=at.micro_batches * _neighbour_seconds(at, stage))


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


def _busy(time: StepTime) -> float:
    return time.matrices + time.recomputation + time.head + time.tensor_messages


def _memory(at: _Setting, stage: int) -> Memory:
    kind = at.kinds[stage]
    part = Stage(
        model=at.model,
        stack=kind.machine.stack,
        layout=at.layout,
        batch_size=at.batch_size,
        blocks=at.blocks[stage],
        number=stage,
    )
    return stage_memory(part, kind.cluster.device)


def _block_seconds(model: ModelSpec, kind: Kind, layout: Layout) -> float:
    shape = (layout.micro_batch, layout.tensor, layout.sequence and layout.tensor > 1)
    passes = block_passes(model, kind.machine, *shape)
    again = again_seconds(model, kind.machine, *shape, layout.checkpointing)
    return passes.forward + passes.backward + again
