"""Seconds of a training step under a layout, by term."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.planner.cluster import Cluster
from elastrata.planner.layout import Layout
from elastrata.planner.memory import blocks_of_stages
from elastrata.planner.operations import (
    Machine,
    Passes,
    block_passes,
    gather_seconds,
    head_passes,
    neighbour_seconds,
    recomputation_seconds,
    sum_seconds,
    traffic_seconds,
)
from elastrata.workload.model_spec import ModelSpec

# Nine fp32 accesses: reads of the parameter, the gradient and two moments, writes of three of them,
# one more read of the gradient for the norm and one write that zeroes it. Up to 4 bytes are for the
# copy of the parameter in the dtype of the computation.
_UPDATE_BYTES = 40
"""Bytes that AdamW reads and writes per parameter."""
_ZERO_BUBBLE = 1 / 3
"""Share of 1F1B's bubble that remains with ZB-H1 if its three passes take equally long (arXiv
2401.10241, section 2)."""
# benchmarks/results/data_loading.json measured 241 M on two shared cores; the plan assumes less
# than half of that.
_TOKENS_PER_SECOND_LOADED = 100e6
"""Tokens per second that one consumer reads through Ray Data."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by term, without messages that computation hides."""

    matrices: float
    """Forward and backward passes of the slowest device's blocks, over all its micro-batches."""
    recomputation: float
    head: float
    """Logits and loss; 0 if the slowest stage is not the last one."""
    tensor_messages: float
    pipeline_messages: float
    bubble: float
    data_messages: float
    update: float
    loading: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.busy + self.messages + self.bubble + self.loading

    @property
    def busy(self) -> float:
        """Seconds in which the device computes."""
        return self.matrices + self.recomputation + self.head + self.update

    @property
    def messages(self) -> float:
        """Seconds in which the device waits for messages."""
        return self.tensor_messages + self.pipeline_messages + self.data_messages


@dataclass(frozen=True)
class _Setting:
    """Inputs that every term depends on."""

    model: ModelSpec
    cluster: Cluster
    machine: Machine
    layout: Layout
    batch_size: int

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of one micro-batch."""
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
    """Return the time of a step, which is that of the slowest stage.

    Args:
        model: model to train.
        cluster: cluster with as many devices as the layout.
        machine: device of the cluster and training system.
        layout: division of model and batch among the devices.
        batch_size: samples of a step, over all devices.
    """
    *before, last = blocks_of_stages(model, machine.stack, layout)
    # Without a head, only a stage with more blocks than the last one can be slower.
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
    """Return the time of a step for a device with `blocks` blocks if no other device is slower.

    Args:
        model: as in `step_time`.
        cluster: as in `step_time`.
        machine: as in `step_time`.
        layout: as in `step_time`.
        batch_size: as in `step_time`.
        blocks: number of blocks on this device.
        has_head: whether the device computes logits.
    """
    at = _Setting(model, cluster, machine, layout, batch_size)
    micro_batches = layout.micro_batches(batch_size)
    shape = (layout.micro_batch, layout.tensor, layout.sequence and layout.tensor > 1)
    block = block_passes(model, machine, *shape)
    again = recomputation_seconds(model, machine, *shape, layout.checkpointing)
    messages = _tensor_message_seconds(at)
    logits = head_passes(model, machine, layout.micro_batch, layout.tensor)
    head = logits.forward + logits.backward
    per_block = block.forward + block.backward + again + messages
    # While a device is idle the others work, on average for the mean time of a stage.
    mean = (per_block * model.layers + head) / layout.pipeline
    return StepTime(
        matrices=micro_batches * blocks * (block.forward + block.backward),
        recomputation=micro_batches * blocks * again,
        head=micro_batches * head if has_head else 0.0,
        tensor_messages=micro_batches * blocks * messages,
        pipeline_messages=micro_batches * _stage_message_seconds(at),
        bubble=bubble_passes(layout, micro_batches) * mean,
        data_messages=_data_message_seconds(at, block, again, blocks, micro_batches),
        update=_update_seconds(at, blocks),
        loading=_loading_seconds(at, micro_batches * blocks * per_block),
    )


def bubble_passes(layout: Layout, micro_batches: int) -> float:
    """Return the idle time of a pipeline device, in units of one micro-batch's time.

    It is p - 1 with one part of the model on each device and (p - 1) / v with v parts (arXiv
    2104.04473, section 2.2). GPipe and 1F1B have the same bubble. A zero-bubble schedule fills two
    thirds of it with weight gradients.
    """
    if layout.pipeline == 1:
        return 0.0
    idle = (layout.pipeline - 1) / layout.virtual_stages
    return idle * (_ZERO_BUBBLE if layout.schedule == "zero_bubble" else 1.0)


def _tensor_message_seconds(at: _Setting) -> float:
    """Return the seconds of one block's tensor-parallel messages for one micro-batch.

    Every block sums the hidden states twice forward and twice backward (arXiv 1909.08053, section
    3). Dividing the tokens replaces each sum with a gather and a scatter of the same cost (arXiv
    2205.05198, section 4.2.2).
    """
    if at.layout.tensor == 1:
        return 0.0
    # Full recomputation repeats the two forward sums. Computation hides none of these messages.
    sums = 6 if at.layout.checkpointing == "full" else 4
    once = sum_seconds(at.cluster, at.machine.messages, at.hidden_bytes, at.layout.tensor, 1)
    return sums * once


def _stage_message_seconds(at: _Setting) -> float:
    """Return the seconds per micro-batch that a device waits for other stages: hidden states
    forward and gradients backward, for every virtual stage."""
    if at.layout.pipeline == 1:
        return 0.0
    once = neighbour_seconds(
        at.cluster, at.machine.messages, at.hidden_bytes, at.layout.tensor, at.stage_stride
    )
    return 2 * at.layout.virtual_stages * once


def _data_message_seconds(
    at: _Setting, block: Passes, again: float, blocks: int, micro_batches: int
) -> float:
    stack = at.machine.stack
    if at.layout.data == 1:
        return 0.0
    if stack.sharding != "all":
        numbers = (blocks * at.model.block_parameters + _outside_parameters(at)) / at.layout.tensor
        return _final_sum_seconds(at, numbers, block, blocks)
    return _sharded_message_seconds(at, block, again, blocks, micro_batches)


def _outside_parameters(at: _Setting) -> float:
    """Return the parameters of embeddings and heads, averaged over the devices along a pipeline."""
    outside = at.model.embedding_parameters + at.model.head_parameters
    return outside / at.layout.pipeline


def _final_sum_seconds(at: _Setting, numbers: float, block: Passes, blocks: int) -> float:
    """Return the exposed seconds of one gradient reduction at the end of a step."""
    stack, layout = at.machine.stack, at.layout
    # Scattering gradients and gathering parameters (ZeRO-1) moves the same bytes as a sum.
    whole = sum_seconds(
        at.cluster,
        at.machine.messages,
        numbers * stack.reduced_bytes,
        layout.data,
        at.data_stride,
    )
    return whole - stack.overlap * min(whole, blocks * block.backward)


def _sharded_message_seconds(
    at: _Setting, block: Passes, again: float, blocks: int, micro_batches: int
) -> float:
    """Return the exposed seconds of FSDP's messages in a step (arXiv 2304.11277).

    The gather of a block's parameters overlaps with the computation of the previous block, and the
    scatter of its gradients with that of the next one.
    """
    stack, layout = at.machine.stack, at.layout
    scatter, reduction = _reduction_seconds(at, at.model.block_parameters / layout.tensor)
    gather = _gather_parameter_seconds(at, at.model.block_parameters / layout.tensor)
    # No computation can hide the gather of parameters outside of blocks.
    first = _gather_parameter_seconds(at, _outside_parameters(at) / layout.tensor)
    again_gathered = gather if layout.reshard else 0.0
    backward = block.backward + again
    plain = _exposure(at, gather, block.forward) + _exposure(at, again_gathered, backward)
    last = _exposure(at, again_gathered + reduction, backward) + _exposure(
        at, gather, block.forward
    )
    kept = _exposure(at, reduction, backward)
    if not stack.accumulates:
        return micro_batches * (blocks * last + first)
    before = micro_batches - 1
    each = scatter if layout.gradient_sync == "micro_batch" else 0.0
    if layout.reshard:
        if each:
            plain = _exposure(at, gather, block.forward)
            plain += _exposure(at, again_gathered + each, backward)
        return blocks * (before * plain + last) + micro_batches * first
    kept += before * _exposure(at, each, backward)
    return blocks * (_exposure(at, gather, block.forward) + kept) + first


def _exposure(at: _Setting, messages: float, computed: float) -> float:
    """Return the seconds of messages that computation does not hide."""
    return messages - at.machine.stack.overlap * min(messages, computed)


def _gather_parameter_seconds(at: _Setting, numbers: float) -> float:
    num_bytes = numbers * at.machine.stack.element_bytes
    return gather_seconds(
        at.cluster, at.machine.messages, num_bytes, at.layout.shards, at.data_stride
    )


def _reduction_seconds(at: _Setting, numbers: float) -> tuple[float, float]:
    """Return the seconds of a scatter among the shards alone, and with the sum over copies after
    it."""
    num_bytes, layout = numbers * at.machine.stack.reduced_bytes, at.layout
    efficiency = at.machine.messages
    scattered = gather_seconds(at.cluster, efficiency, num_bytes, layout.shards, at.data_stride)
    stride = at.data_stride * layout.shards
    summed = sum_seconds(at.cluster, efficiency, num_bytes / layout.shards, layout.copies, stride)
    return scattered, scattered + summed


def _update_seconds(at: _Setting, blocks: int) -> float:
    """Return the seconds in which the optimizer reads and writes this device's shard of the
    states."""
    layout, stack = at.layout, at.machine.stack
    numbers = blocks * at.model.block_parameters + _outside_parameters(at)
    numbers /= layout.tensor * (1 if stack.sharding == "none" else layout.shards)
    return traffic_seconds(at.machine.device, at.machine.efficiency, numbers * _UPDATE_BYTES)


def _loading_seconds(at: _Setting, computed: float) -> float:
    """Return the seconds of data loading that the computation of the previous step does not
    hide."""
    tokens = at.batch_size * at.model.seq_len
    return max(0.0, tokens / (_TOKENS_PER_SECOND_LOADED * at.layout.data) - computed)
