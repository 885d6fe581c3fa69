"""Peak memory of the device that needs most, from the moments of a step that can be the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from elastrata.pipeline.stages import stage_spans
from elastrata.planner.activations import (
    backward_gradients,
    block_activations,
    deferred_gradient_bytes,
    embedding_norm_activations,
    head_activations,
    head_inputs,
    hidden_state_buffers,
    logits_and_loss,
    micro_batches_in_flight,
    recomputed_activations,
    saved_activations,
    saved_gate_product,
)
from elastrata.planner.devices import Device
from elastrata.planner.layout import Layout
from elastrata.planner.stack import FP32_BYTES, Stack
from elastrata.workload.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Memory terms at one moment of a step, in bytes. The fields are those of `Memory`."""

    gathered: float
    gradients: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return self.gathered + self.gradients + self.activations + self.working


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One device's part of a model: a pipeline stage, or the whole model."""

    model: ModelSpec
    stack: Stack
    layout: Layout
    batch_size: int
    blocks: int
    number: int
    """Index of the stage, from 0."""

    @property
    def has_head(self) -> bool:
        """True if this stage computes logits."""
        return self.number == self.layout.pipeline - 1

    @cached_property
    def numbers(self) -> float:
        """Number of parameters before division among tensor-parallel devices."""
        model = self.model
        numbers = self.blocks * model.block_parameters
        if self.number == 0:
            numbers += model.embedding_parameters
        if not self.has_head:
            return numbers
        if self.number == 0:
            return numbers + model.head_parameters
        # A tied table is copied to the last stage, which applies it as the head.
        return numbers + model.vocabulary * model.hidden + model.head_extra + model.sample_extra

    @property
    def shards(self) -> int:
        """Number of devices that share the stage's state."""
        return self.layout.shards if self.stack.sharding != "none" else 1

    @property
    def state_bytes(self) -> float:
        """Bytes of this device's shard of parameters and optimizer states."""
        spared = 0.0
        # Muon keeps one moment for the matrices of blocks, AdamW two.
        if not self.stack.has_second_moments:
            matrices = self.blocks * self.model.block_matrices / self.layout.tensor
            spared = matrices * FP32_BYTES
        return (self.own * self.stack.state_bytes - spared) / self.shards

    @property
    def peak(self) -> Moment:
        """The moment with the largest total."""
        moments = [self.moment_at_end()]
        # If gradients exist when the most micro-batches are in flight, the first backward pass is
        # no peak.
        for before in (0, 1) if self.all_go_forward_first else (1,):
            moments += [self.moment_in_last_block(before), self.moment_in_first_blocks(before)]
            if self.has_head:
                moments.append(self.moment_at_loss(before))
        return max(moments, key=lambda moment: moment.total)

    @cached_property
    def own(self) -> float:
        """Parameters of each tensor-parallel device."""
        # The position table is replicated on all tensor-parallel devices.
        whole = self.model.position_rows * self.model.hidden if self.number == 0 else 0
        return (self.numbers - whole) / self.layout.tensor + whole

    @property
    def has_split_backward(self) -> bool:
        """True if weight gradients are computed later than input gradients."""
        return self.layout.pipeline > 1 and self.layout.schedule == "zero_bubble"

    @property
    def goes_forward_first(self) -> bool:
        """True if all micro-batches go forward before the first goes backward."""
        return self.layout.pipeline > 1 and self.layout.schedule == "gpipe"

    @property
    def all_go_forward_first(self) -> bool:
        """True if the stage holds no gradients when most micro-batches are in flight."""
        few = self.layout.pipeline > 1 and self.micro_batches <= self.in_flight
        return few or self.goes_forward_first

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.layout.micro_batches(self.batch_size)

    @property
    def waiting(self) -> float:
        """Micro-batches that wait for their weight gradients, without the newest."""
        return min(self.number, self.micro_batches) / self.layout.virtual_stages

    def moment_at_loss(self, before: int) -> Moment:
        """Return the moment at which the newest micro-batch's backward pass begins.

        Args:
            before: 0 for the first backward pass of the step, 1 if gradients of earlier ones exist.
        """
        logits = logits_and_loss(self.model, self.stack, self.layout)
        inputs = head_inputs(self.model, self.stack, self.layout)
        return Moment(
            gathered=self._gathered_parameters(1),
            gradients=self._accumulated_gradients() * before,
            # The newest head activations are the working memory of this moment.
            activations=self._activations_in_flight(before, newest=0),
            working=logits + inputs,
        )

    def moment_in_last_block(self, before: int) -> Moment:
        """Return the moment at which the last block goes backward; `before` as in `at_loss`."""
        layout = self.layout
        working = backward_gradients(self.model, self.stack, layout)
        working += recomputed_activations(self.model, self.stack, layout)
        if self.has_head:
            # The gradient of the head's table exists until all blocks have gone backward.
            columns = self.model.vocabulary / layout.tensor
            working += columns * self.model.hidden * self.stack.element_bytes
        if self.has_split_backward:
            working += self._waiting_gradients() / layout.virtual_stages
            working += saved_gate_product(self.model, self.stack, layout)
        return Moment(
            gathered=self._gathered_parameters(2),
            gradients=self._accumulated_gradients() * before,
            activations=self._activations_in_flight(
                before, newest=1 if self.has_split_backward else 0
            ),
            working=working,
        )

    def moment_in_first_blocks(self, before: int) -> Moment:
        """Return the moment at which the first blocks go backward; `before` as in `at_loss`."""
        moment, layout, stack = self.moment_in_last_block(before), self.layout, self.stack
        # In a pipeline FSDP2 keeps blocks gathered for a backward pass (except the last of a step)
        # until they have gone forward again.
        behind = self.blocks // layout.virtual_stages - 2
        if not self._stays_gathered or behind <= 0:
            return moment
        block = self.model.block_parameters / layout.tensor
        first = self._accumulated_gradients() and block * (behind + 1) * stack.gradient_bytes
        return replace(
            moment,
            gathered=moment.gathered + behind * block * stack.element_bytes,
            gradients=moment.gradients if before else first,
            activations=moment.activations - behind * self._kept_of_block(),
        )

    def moment_at_end(self) -> Moment:
        """Return the moment at which the last backward pass ends."""
        return Moment(
            gathered=self._gathered_parameters(2),
            gradients=self._gradients_at_end(),
            activations=self._hidden_states_in_transit(),
            working=block_activations(self.model, self.stack, self.layout),
        )

    @property
    def in_flight(self) -> float:
        """Number of micro-batches that wait for their backward pass, including the newest."""
        # A stage that is n stages earlier holds n more micro-batches.
        stage = self.number - self.stack.extra_micro_batches
        return micro_batches_in_flight(self.layout, self.micro_batches, stage)

    @property
    def _stays_gathered(self) -> bool:
        is_gathered = self.stack.sharding == "all" and self.layout.reshard
        return is_gathered and self.layout.pipeline > 1 and self.micro_batches > 1

    def _kept_of_block(self) -> float:
        """Return the bytes that one block keeps for one micro-batch."""
        model, stack, layout = self.model, self.stack, self.layout
        return saved_activations(model, stack, layout, block_activations(model, stack, layout))

    def _hidden_states_in_transit(self) -> float:
        return hidden_state_buffers(
            self.model, self.stack, self.layout, self.micro_batches, self.in_flight, self.number
        )

    def _activations_in_flight(self, before: int, *, newest: int) -> float:
        """Return the bytes kept for all micro-batches in flight. `newest` is 1 to include the head
        activations of the newest one."""
        in_flight = self.in_flight - (before if self.all_go_forward_first else 0)
        model, stack, layout = self.model, self.stack, self.layout
        kept = self._kept_of_block() * self.blocks * in_flight + self._hidden_states_in_transit()
        if self.number == 0:
            kept += embedding_norm_activations(model, stack, layout) * in_flight
        if self.has_split_backward:
            kept += self._waiting_gradients() * self.waiting
        return kept + self._head_activations_in_flight(newest) if self.has_head else kept

    def _head_activations_in_flight(self, newest: int) -> float:
        """Return the bytes of head activations of micro-batches before their backward pass or
        weight gradients."""
        head = head_activations(self.model, self.stack, self.layout)
        if self.goes_forward_first:
            return head * (self.micro_batches - 1)
        if not self.has_split_backward:
            return 0.0
        inputs = head_inputs(self.model, self.stack, self.layout)
        # Weight gradients also need the gradients of the head's inputs.
        return (head + inputs) * (self.waiting + newest)

    def _waiting_gradients(self) -> float:
        return self.blocks * deferred_gradient_bytes(self.model, self.stack, self.layout)

    def _accumulated_gradients(self) -> float:
        """Return the bytes of gradients of earlier micro-batches at the start of a backward pass.

        They are unsharded if gradients are reduced once per step, and sharded otherwise.
        """
        if self.stack.sharding != "all":
            return self.own * self.stack.gradient_bytes
        if not self.stack.accumulates or self.micro_batches == 1:
            return 0.0
        if self.layout.gradient_sync == "step":
            return self.own * self.stack.gradient_bytes
        # In bf16, sums over copies wait for the last micro-batch in a buffer besides FSDP2's.
        is_twice = self.layout.copies > 1 and self.stack.reduced_bytes == 2
        return self.own / self.layout.shards * self.stack.gradient_bytes * (1 + is_twice)

    def _gathered_parameters(self, blocks: int) -> float:
        """Return the bytes of gathered parameters: `blocks` blocks and all parameters outside of
        blocks."""
        if self.stack.sharding != "all" or not self.layout.reshard:
            return self.own * self.stack.element_bytes
        # FSDP2 holds the computed block and the message that prefetches the next one; at the loss
        # only the last block. Even a single shard is copied.
        ahead, outside = self._bucket_sizes(blocks)
        return (ahead + outside) * self.stack.element_bytes

    def _gradients_at_end(self) -> float:
        """Return the bytes of gradients at the end of the last backward pass."""
        stack = self.stack
        if stack.sharding != "all":
            return self.own * stack.gradient_bytes
        # A bucket in reduction exists twice: as gradients and as the message.
        in_reduction = max(self._bucket_sizes(2)) * (stack.gradient_bytes + stack.reduced_bytes)
        return self.own / self.layout.shards * stack.gradient_bytes + in_reduction

    def _bucket_sizes(self, most: int) -> tuple[float, float]:
        """Return the parameters of up to `most` blocks, and those outside of blocks."""
        block = self.model.block_parameters / self.layout.tensor
        outside = self.own - self.blocks * block
        return min(most, self.blocks) * block, max(0.0, outside)


def blocks_of_stages(model: ModelSpec, stack: Stack, layout: Layout) -> tuple[int, ...]:
    """Return the number of blocks on each device along a pipeline, summed over its virtual stages.

    Args:
        model: model to split.
        stack: training system that splits it.
        layout: layout with the numbers of stages and virtual stages.
    """
    parts = layout.pipeline * layout.virtual_stages
    if parts == 1:
        return (model.layers,)
    if stack.equal_stages or model.layers < parts:
        return (layout.virtual_stages * -(-model.layers // parts),) * layout.pipeline
    lengths = _span_lengths(tuple(model.block_flops), parts, layout.stage_speeds)
    return tuple(sum(lengths[stage :: layout.pipeline]) for stage in range(layout.pipeline))


@cache
# The search asks for the same split with every micro-batch size and sharding.
def _span_lengths(costs: tuple[int, ...], parts: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of blocks of each part, as `pipeline/stages.py` splits them."""
    return tuple(map(len, stage_spans(costs, parts, speeds or None)))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device, in bytes."""

    parameters: float
    """This device's shard of parameters and optimizer states."""
    gathered: float
    """Unsharded parameters in the dtype of the computation."""
    gradients: float
    """Gradients: accumulated, reduced, and in reduction."""
    activations: float
    """Activations that blocks keep for the backward pass, of all micro-batches in flight."""
    working: float
    """Temporaries: recomputed activations of the current block, logits and loss."""
    reserved: float
    """Driver, kernels and communication library."""
    fragmentation: float
    building: float
    """Memory during model construction, before the first step: this device's shard of the
    parameters and the largest parameter, whole, during its random initialisation. No memory of a
    step exists then."""

    @property
    def total(self) -> float:
        """Peak over construction and training."""
        kept = self.parameters + self.gathered + self.gradients + self.activations
        return max(kept + self.working, self.building) + self.reserved + self.fragmentation


def memory(
    model: ModelSpec, device: Device, stack: Stack, layout: Layout, batch_size: int
) -> Memory:
    """Return the peak memory of a step on the device that needs most.

    The peak is either at the start of a backward pass, with all activations, or at its end, with
    all gradients.

    Args:
        model: model to train.
        device: device to train on.
        stack: training system.
        layout: division of the model among devices.
        batch_size: samples of a step, over all devices.
    """
    blocks = blocks_of_stages(model, stack, layout)
    needs = [
        stage_memory(
            Stage(
                model=model,
                stack=stack,
                layout=layout,
                batch_size=batch_size,
                blocks=blocks[number],
                number=number,
            ),
            device,
        )
        for number in peak_stage_candidates(blocks)
    ]
    return max(needs, key=lambda need: need.total)


def peak_stage_candidates(blocks: Sequence[int]) -> set[int]:
    """Return the indices of stages that can need most memory.

    These are the first stage, the last stage, and the first and the last of the stages with most
    blocks if they have more blocks than the first stage.

    Args:
        blocks: number of blocks of each stage.
    """
    last, most = len(blocks) - 1, max(blocks[:-1], default=0)
    # The first stage holds the most micro-batches in flight, so equal stages behind it need less.
    if most <= blocks[0]:
        return {0, last}
    longest = [number for number in range(last) if blocks[number] == most]
    return {0, last, longest[0], longest[-1]}


def stage_memory(stage: Stage, device: Device) -> Memory:
    """Return the peak memory of a device that holds the given stage."""
    state, most = stage.state_bytes, stage.peak
    return Memory(
        parameters=state,
        gathered=most.gathered,
        gradients=most.gradients,
        activations=most.activations,
        working=most.working,
        reserved=device.reserved_bytes,
        fragmentation=stage.stack.fragmentation * (state + most.total),
        building=FP32_BYTES * (stage.own / stage.shards + _largest_parameter(stage.model)),
    )


def _largest_parameter(model: ModelSpec) -> int:
    """Return the size of the largest parameter: the token table or a feed-forward matrix."""
    return model.hidden * max(model.vocabulary, model.feed_forward)
