"""Bytes on the device that needs most of them, at the moments of a step that need most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from elastrata.pipeline.stages import stage_spans
from elastrata.planner.activations import (
    block_activations,
    computed_again,
    head_activations,
    head_inputs,
    in_backward,
    kept_activations,
    kept_product,
    logits_and_loss,
    micro_batches_in_flight,
    normed_embeddings,
    travelling,
    waiting_gradients,
)
from elastrata.planner.devices import Device
from elastrata.planner.layout import Layout
from elastrata.planner.stack import FP32_BYTES, Stack
from elastrata.workload.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Terms of a moment of a step, as `Memory` has them."""

    gathered: float
    gradients: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """In all."""
        return self.gathered + self.gradients + self.activations + self.working


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A device's part of a model: a stage of a pipeline, or all of it."""

    model: ModelSpec
    stack: Stack
    layout: Layout
    batch_size: int
    blocks: int
    number: int
    """From 0."""

    @property
    def has_head(self) -> bool:
        """Whether it makes logits."""
        return self.number == self.layout.pipeline - 1

    @cached_property
    def numbers(self) -> float:
        """Its parameters, before tensor-parallel devices divide them."""
        model = self.model
        numbers = self.blocks * model.block_parameters
        if self.number == 0:
            numbers += model.embedding_parameters
        if not self.has_head:
            return numbers
        if self.number == 0:
            return numbers + model.head_parameters
        return numbers + model.vocabulary * model.hidden + model.head_extra + model.sample_extra

    @property
    def shards(self) -> int:
        """Devices that share its state."""
        return self.layout.shards if self.stack.sharding != "none" else 1

    @property
    def state_bytes(self) -> float:
        """Of this device's share of the parameters, and of what the optimizer keeps."""
        spared = 0.0
        if not self.stack.has_second_moments:
            matrices = self.blocks * self.model.block_matrices / self.layout.tensor
            spared = matrices * FP32_BYTES
        return (self.own * self.stack.state_bytes - spared) / self.shards

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        moments = [self.at_end()]
        for before in (0, 1) if self.all_go_forward_first else (1,):
            moments += [self.in_block(before), self.at_front(before)]
            if self.has_head:
                moments.append(self.at_loss(before))
        return max(moments, key=lambda moment: moment.total)

    @cached_property
    def own(self) -> float:
        """Parameters of each tensor-parallel device: positions are whole on all of them."""
        whole = self.model.position_rows * self.model.hidden if self.number == 0 else 0
        return (self.numbers - whole) / self.layout.tensor + whole

    @property
    def is_divided(self) -> bool:
        """Whether gradients of weights come later than those of inputs."""
        return self.layout.pipeline > 1 and self.layout.schedule == "zero_bubble"

    @property
    def goes_forward_first(self) -> bool:
        """Whether all micro-batches go forward before the first goes backward."""
        return self.layout.pipeline > 1 and self.layout.schedule == "gpipe"

    @property
    def all_go_forward_first(self) -> bool:
        """Whether it has no gradients when most micro-batches are in flight."""
        few = self.layout.pipeline > 1 and self.micro_batches <= self.in_flight
        return few or self.goes_forward_first

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.layout.micro_batches(self.batch_size)

    @property
    def waiting(self) -> float:
        """Micro-batches that wait for their gradients of weights beside the newest."""
        return min(self.number, self.micro_batches) / self.layout.virtual_stages

    def at_loss(self, before: int) -> Moment:
        """Where the newest micro-batch's backward pass begins.

        Args:
            before: 0: it is the first one; 1: there are gradients of others.
        """
        logits = logits_and_loss(self.model, self.stack, self.layout)
        inputs = head_inputs(self.model, self.stack, self.layout)
        return Moment(
            gathered=self._gathered(1),
            gradients=self._accumulated() * before,
            activations=self._kept(before, newest=0),
            working=logits + inputs,
        )

    def in_block(self, before: int) -> Moment:
        """Where its last block goes backward."""
        layout = self.layout
        working = in_backward(self.model, self.stack, layout)
        working += computed_again(self.model, self.stack, layout)
        if self.has_head:  # the gradient of its table is there until all blocks are done
            columns = self.model.vocabulary / layout.tensor
            working += columns * self.model.hidden * self.stack.element_bytes
        if self.is_divided:
            working += self._waiting_gradients() / layout.virtual_stages
            working += kept_product(self.model, self.stack, layout)
        return Moment(
            gathered=self._gathered(2),
            gradients=self._accumulated() * before,
            activations=self._kept(before, newest=1 if self.is_divided else 0),
            working=working,
        )

    def at_front(self, before: int) -> Moment:
        """Where its first blocks go backward. A pipeline has FSDP2 keep what was gathered for a
        backward pass, but for the last one of a step, until it has gone forward again."""
        moment, layout, stack = self.in_block(before), self.layout, self.stack
        behind = self.blocks // layout.virtual_stages - 2
        if not self._stays_gathered or behind <= 0:
            return moment
        block = self.model.block_parameters / layout.tensor
        first = self._accumulated() and block * (behind + 1) * stack.gradient_bytes
        return replace(
            moment,
            gathered=moment.gathered + behind * block * stack.element_bytes,
            gradients=moment.gradients if before else first,
            activations=moment.activations - behind * self._kept_of_block(),
        )

    def at_end(self) -> Moment:
        """Where the last backward pass ends."""
        return Moment(
            gathered=self._gathered(2),
            gradients=self._reduced(),
            activations=self._travelling(),
            working=block_activations(self.model, self.stack, self.layout),
        )

    @property
    def in_flight(self) -> float:
        """Micro-batches that wait for their backward pass, the newest with them."""
        stage = self.number - self.stack.extra_micro_batches
        return micro_batches_in_flight(self.layout, self.micro_batches, stage)

    @property
    def _stays_gathered(self) -> bool:
        is_gathered = self.stack.sharding == "all" and self.layout.reshard
        return is_gathered and self.layout.pipeline > 1 and self.micro_batches > 1

    def _kept_of_block(self) -> float:
        """Of one micro-batch."""
        model, stack, layout = self.model, self.stack, self.layout
        return kept_activations(model, stack, layout, block_activations(model, stack, layout))

    def _travelling(self) -> float:
        return travelling(
            self.model, self.stack, self.layout, self.micro_batches, self.in_flight, self.number
        )

    def _kept(self, before: int, *, newest: int) -> float:
        """Of all micro-batches in flight; of the newest one's head, too, where that is 1."""
        in_flight = self.in_flight - (before if self.all_go_forward_first else 0)
        model, stack, layout = self.model, self.stack, self.layout
        kept = self._kept_of_block() * self.blocks * in_flight + self._travelling()
        if self.number == 0:
            kept += normed_embeddings(model, stack, layout) * in_flight
        if self.is_divided:
            kept += self._waiting_gradients() * self.waiting
        return kept + self._heads(newest) if self.has_head else kept

    def _heads(self, newest: int) -> float:
        """Of micro-batches that have gone forward, or wait for their gradients of weights, which
        takes the gradients of the head's inputs as well."""
        head = head_activations(self.model, self.stack, self.layout)
        if self.goes_forward_first:
            return head * (self.micro_batches - 1)
        if not self.is_divided:
            return 0.0
        inputs = head_inputs(self.model, self.stack, self.layout)
        return (head + inputs) * (self.waiting + newest)

    def _waiting_gradients(self) -> float:
        return self.blocks * waiting_gradients(self.model, self.stack, self.layout)

    def _accumulated(self) -> float:
        """Gradients where a backward pass begins: those of the micro-batches before it, whole where
        they are reduced once a step, else this shard's."""
        if self.stack.sharding != "all":
            return self.own * self.stack.gradient_bytes
        if not self.stack.accumulates or self.micro_batches == 1:
            return 0.0
        parts = self.layout.shards if self.layout.gradient_sync == "micro_batch" else 1
        return self.own / parts * self.stack.gradient_bytes

    def _gathered(self, blocks: int) -> float:
        """FSDP2 holds the block that is computed, the message of the next one, and what is outside
        of blocks; a lone shard is copied, too. At the loss it holds the last block alone."""
        if self.stack.sharding != "all" or not self.layout.reshard:
            return self.own * self.stack.element_bytes
        ahead, outside = self._buckets(blocks)
        return (ahead + outside) * self.stack.element_bytes

    def _reduced(self) -> float:
        """Gradients where the last backward pass ends: this shard's, and those on their way, as
        they are and as a message."""
        stack = self.stack
        if stack.sharding != "all":
            return self.own * stack.gradient_bytes
        on_their_way = max(self._buckets(2)) * (stack.gradient_bytes + stack.reduced_bytes)
        return self.own / self.layout.shards * stack.gradient_bytes + on_their_way

    def _buckets(self, most: int) -> tuple[float, float]:
        """Parameters of so many blocks, and of what is outside of blocks."""
        block = self.model.block_parameters / self.layout.tensor
        outside = self.own - self.blocks * block
        return min(most, self.blocks) * block, max(0.0, outside)


def blocks_of_stages(model: ModelSpec, stack: Stack, layout: Layout) -> tuple[int, ...]:
    """The blocks of each device along a pipeline, of all its parts of the model together.

    Args:
        model: that is cut.
        stack: the system that cuts it.
        layout: with one part of the model, or several, on each of these devices.
    """
    parts = layout.pipeline * layout.virtual_stages
    if parts == 1:
        return (model.layers,)
    if stack.equal_stages or model.layers < parts:
        return (layout.virtual_stages * -(-model.layers // parts),) * layout.pipeline
    lengths = _span_lengths(tuple(model.block_flops), parts, layout.stage_speeds)
    return tuple(sum(lengths[stage :: layout.pipeline]) for stage in range(layout.pipeline))


@cache
def _span_lengths(costs: tuple[int, ...], parts: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """By `pipeline/stages.py`."""
    return tuple(map(len, stage_spans(costs, parts, speeds or None)))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device."""

    parameters: float
    """Its share of the parameters and of what the optimizer keeps."""
    gathered: float
    """Whole parameters, as they are applied."""
    gradients: float
    """Gradients: added up over micro-batches, reduced, and on their way."""
    activations: float
    """Kept by blocks for the backward pass, of all micro-batches in flight."""
    working: float
    """The block that is computed, where its activations are computed again; logits and loss."""
    reserved: float
    """The driver, its kernels, the communication library."""
    fragmentation: float
    building: float
    """While the model is made, before its first step: this device's shard of the parameters, and
    the largest of them, whole, as it is drawn. Nothing of a step is there then."""

    @property
    def total(self) -> float:
        """The most at any time."""
        kept = self.parameters + self.gathered + self.gradients + self.activations
        return max(kept + self.working, self.building) + self.reserved + self.fragmentation


def memory(
    model: ModelSpec, device: Device, stack: Stack, layout: Layout, batch_size: int
) -> Memory:
    """Memory of a step at its peak: where a backward pass begins, with all activations, or where
    it ends, with all gradients.

    Args:
        model: that is trained.
        device: it is trained on.
        stack: the system that trains it.
        layout: how devices divide it.
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
        for number in fullest(blocks)
    ]
    return max(needs, key=lambda need: need.total)


def fullest(blocks: Sequence[int]) -> set[int]:
    """Stages of which one needs most memory: the first, the last, and between them the first and
    the last with most blocks, where these are more than the first stage has.

    Args:
        blocks: of each stage.
    """
    last, most = len(blocks) - 1, max(blocks[:-1], default=0)
    if most <= blocks[0]:
        return {0, last}
    longest = [number for number in range(last) if blocks[number] == most]
    return {0, last, longest[0], longest[-1]}


def stage_memory(stage: Stage, device: Device) -> Memory:
    """Memory of a device with that part of the model, at its peak."""
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
    """Numbers of the largest parameter: the table of tokens, or a feed-forward's matrix."""
    return model.hidden * max(model.vocabulary, model.feed_forward)
