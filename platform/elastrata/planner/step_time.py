"""Seconds of a training step under a layout, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.planner.cluster import Cluster
from elastrata.planner.layout import Layout
from elastrata.planner.memory import blocks_of_stages
from elastrata.planner.operations import (
    Machine,
    Passes,
    again_seconds,
    block_passes,
    gather_seconds,
    head_passes,
    neighbour_seconds,
    sum_seconds,
    traffic_seconds,
)
from elastrata.workload.model_spec import ModelSpec

_UPDATE_BYTES = 40
"""AdamW, per number: reads parameter, gradient and two moments, writes three of them and the
parameter as it is applied; the norm reads the gradient once more, and it is set to zero."""
_ZERO_BUBBLE = 1 / 3
"""Share of 1F1B's bubble that ZB-H1 leaves where its three passes take equally long
(arXiv 2401.10241, section 2)."""
_TOKENS_PER_SECOND_LOADED = 100e6
"""By one consumer through Ray Data: benchmarks/results/data_loading.json has 241 M on two shared
cores; less than half of it is counted on."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds. What is hidden behind computation is not in them."""

    matrices: float
    """Forward and backward of the slowest device's blocks, over all its micro-batches."""
    recomputation: float
    head: float
    """Logits and loss, where the last stage is the slowest."""
    tensor_messages: float
    pipeline_messages: float
    bubble: float
    data_messages: float
    update: float
    loading: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.busy + self.messages + self.bubble + self.loading

    @property
    def busy(self) -> float:
        """The device computes."""
        return self.matrices + self.recomputation + self.head + self.update

    @property
    def messages(self) -> float:
        """The device waits for messages."""
        return self.tensor_messages + self.pipeline_messages + self.data_messages


@dataclass(frozen=True)
class _Setting:
    """The setting that every term depends on."""

    model: ModelSpec
    cluster: Cluster
    machine: Machine
    layout: Layout
    batch_size: int

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a micro-batch's hidden states."""
        tokens = self.layout.micro_batch * self.model.seq_len
        return float(tokens * self.model.hidden * self.machine.stack.element_bytes)

    @property
    def data_stride(self) -> int:
        return self.layout.tensor

    @property
    def stage_stride(self) -> int:
        return self.layout.tensor * self.layout.data


def step_time(
    model: ModelSpec, cluster: Cluster, machine: Machine, layout: Layout, batch_size: int
) -> StepTime:
    """The time of a step of `batch_size` samples: that of the slowest stage.

    Args:
        model: that is trained.
        cluster: with as many devices as the layout has.
        machine: the cluster's device, and the system.
        layout: how they are used.
        batch_size: samples of a step, over all devices.
    """
    *before, last = blocks_of_stages(model, machine.stack, layout)
    stages = [(last, True)]
    if (most := max(before, default=0)) > last:
        stages.append((most, False))
    times = [
        stage_time(model, cluster, machine, layout, batch_size, blocks=blocks, has_head=has_head)
        for blocks, has_head in stages
    ]
    return max(times, key=lambda time: time.total)


def stage_time(
    model: ModelSpec,
    cluster: Cluster,
    machine: Machine,
    layout: Layout,
    batch_size: int,
    *,
    blocks: int,
    has_head: bool,
) -> StepTime:
    """The time of a step for a device with so many blocks, where no other device is slower.

    Args:
        model: see `step_time`, like the following.
        cluster: see there.
        machine: see there.
        layout: see there.
        batch_size: see there.
        blocks: of this device.
        has_head: whether it makes logits.
    """
    at = _Setting(model, cluster, machine, layout, batch_size)
    micro_batches = layout.micro_batches(batch_size)
    shape = (layout.micro_batch, layout.tensor, layout.sequence and layout.tensor > 1)
    block = block_passes(model, machine, *shape)
    again = again_seconds(model, machine, *shape, layout.checkpointing)
    talk = _tensor_messages(at)
    logits = head_passes(model, machine, layout.micro_batch, layout.tensor)
    head = logits.forward + logits.backward
    per_block = block.forward + block.backward + again + talk
    mean = (per_block * model.layers + head) / layout.pipeline
    return StepTime(
        matrices=micro_batches * blocks * (block.forward + block.backward),
        recomputation=micro_batches * blocks * again,
        head=micro_batches * head if has_head else 0.0,
        tensor_messages=micro_batches * blocks * talk,
        pipeline_messages=micro_batches * _neighbour_messages(at),
        bubble=bubble_passes(layout, micro_batches) * mean,
        data_messages=_data_messages(at, block, again, blocks, micro_batches),
        update=_update(at, blocks),
        loading=_loading(at, micro_batches * blocks * per_block),
    )


def bubble_passes(layout: Layout, micro_batches: int) -> float:
    """Micro-batches' worth of time in which a device of a pipeline has nothing to do.

    p - 1 of them where a device has one part of the model, (p - 1) / v with v parts
    (arXiv 2104.04473, section 2.2); a zero-bubble schedule fills two thirds of it with gradients of
    weights. GPipe's is 1F1B's.
    """
    if layout.pipeline == 1:
        return 0.0
    idle = (layout.pipeline - 1) / layout.virtual_stages
    return idle * (_ZERO_BUBBLE if layout.schedule == "zero_bubble" else 1.0)


def _tensor_messages(at: _Setting) -> float:
    """Two sums of the hidden states forward and two backward, in every block, and the two forward
    ones again where all of it is recomputed (arXiv 1909.08053, section 3). Dividing the tokens
    makes a gather and a scatter of each sum (arXiv 2205.05198, section 4.2.2). None is hidden."""
    if at.layout.tensor == 1:
        return 0.0
    sums = 6 if at.layout.checkpointing == "full" else 4
    once = sum_seconds(at.cluster, at.machine.messages, at.hidden_bytes, at.layout.tensor, 1)
    return sums * once


def _neighbour_messages(at: _Setting) -> float:
    """Hidden states forward and their gradients backward, at every part of the model. What a
    device waits for, per micro-batch."""
    if at.layout.pipeline == 1:
        return 0.0
    once = neighbour_seconds(
        at.cluster, at.machine.messages, at.hidden_bytes, at.layout.tensor, at.stage_stride
    )
    return 2 * at.layout.virtual_stages * once


def _data_messages(
    at: _Setting, block: Passes, again: float, blocks: int, micro_batches: int
) -> float:
    stack = at.machine.stack
    if at.layout.data == 1:
        return 0.0
    if stack.sharding != "all":
        numbers = (blocks * at.model.block_parameters + _outside(at)) / at.layout.tensor
        return _sum_at_the_end(at, numbers, block, blocks)
    return _sharded(at, block, again, blocks, micro_batches)


def _outside(at: _Setting) -> float:
    """Parameters of the embeddings and heads, for each device along a pipeline."""
    outside = at.model.embedding_parameters + at.model.head_parameters
    return outside / at.layout.pipeline


def _sum_at_the_end(at: _Setting, numbers: float, block: Passes, blocks: int) -> float:
    """Gradients are summed, or scattered and the parameters gathered: the same bytes."""
    stack, layout = at.machine.stack, at.layout
    whole = sum_seconds(
        at.cluster,
        at.machine.messages,
        numbers * stack.reduced_bytes,
        layout.data,
        at.data_stride,
    )
    return whole - stack.overlap * min(whole, blocks * block.backward)


def _sharded(at: _Setting, block: Passes, again: float, blocks: int, micro_batches: int) -> float:
    """FSDP (arXiv 2304.11277): a block's parameters are gathered while the one before is computed,
    its gradients scattered while the next one's are. What is outside of blocks is gathered before
    anything can be computed."""
    stack, layout = at.machine.stack, at.layout
    scatter, reduction = _reduction(at, at.model.block_parameters / layout.tensor)
    gather = _gather(at, at.model.block_parameters / layout.tensor)
    first = _gather(at, _outside(at) / layout.tensor)
    again_gathered = gather if layout.reshard else 0.0
    backward = block.backward + again
    plain = _exposed(at, gather, block.forward) + _exposed(at, again_gathered, backward)
    last = _exposed(at, again_gathered + reduction, backward) + _exposed(at, gather, block.forward)
    kept = _exposed(at, reduction, backward)
    if not stack.accumulates:
        return micro_batches * (blocks * last + first)
    before = micro_batches - 1
    each = scatter if layout.gradient_sync == "micro_batch" else 0.0
    if layout.reshard:
        if each:
            plain = _exposed(at, gather, block.forward)
            plain += _exposed(at, again_gathered + each, backward)
        return blocks * (before * plain + last) + micro_batches * first
    kept += before * _exposed(at, each, backward)
    return blocks * (_exposed(at, gather, block.forward) + kept) + first


def _exposed(at: _Setting, messages: float, computed: float) -> float:
    return messages - at.machine.stack.overlap * min(messages, computed)


def _gather(at: _Setting, numbers: float) -> float:
    num_bytes = numbers * at.machine.stack.element_bytes
    return gather_seconds(
        at.cluster, at.machine.messages, num_bytes, at.layout.shards, at.data_stride
    )


def _reduction(at: _Setting, numbers: float) -> tuple[float, float]:
    """Seconds of a scatter among the shards, and with a sum over the copies after it."""
    num_bytes, layout = numbers * at.machine.stack.reduced_bytes, at.layout
    efficiency = at.machine.messages
    scattered = gather_seconds(at.cluster, efficiency, num_bytes, layout.shards, at.data_stride)
    stride = at.data_stride * layout.shards
    summed = sum_seconds(at.cluster, efficiency, num_bytes / layout.shards, layout.copies, stride)
    return scattered, scattered + summed


def _update(at: _Setting, blocks: int) -> float:
    """The optimizer reads and writes this device's share of the states."""
    layout, stack = at.layout, at.machine.stack
    numbers = blocks * at.model.block_parameters + _outside(at)
    numbers /= layout.tensor * (1 if stack.sharding == "none" else layout.shards)
    return traffic_seconds(at.machine.device, at.machine.efficiency, numbers * _UPDATE_BYTES)


def _loading(at: _Setting, computed: float) -> float:
    """Reading is hidden behind the step before, as far as it is faster."""
    tokens = at.batch_size * at.model.seq_len
    return max(0.0, tokens / (_TOKENS_PER_SECOND_LOADED * at.layout.data) - computed)
