"""A device's part of a model, and what it holds at the moments of a step that need most."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.activations import (
    block_activations,
    blocks_in_flight,
    computed_again,
    head_activations,
    head_inputs,
    in_backward,
    kept_activations,
    kept_product,
    logits_and_loss,
    normed_embeddings,
    travelling,
    waiting_gradients,
)
from elastrata.planner.layout import Layout
from elastrata.planner.stack import FP32_BYTES, Stack


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
    numbers: float
    """Its parameters, before tensor-parallel devices divide them."""
    number: int
    """From 0."""
    has_head: bool

    @property
    def shards(self) -> int:
        """Devices that share its state."""
        return self.layout.shards if self.stack.sharding != "none" else 1

    @property
    def state_bytes(self) -> float:
        """Of this device's share of the parameters, and of what the optimizer keeps."""
        spared = 0.0
        if not self.stack.has_second_moments:
            blocks = self.layout.layers_of_stage(self.model.layers)
            matrices = blocks * self.model.block_matrices / self.layout.tensor
            spared = matrices * FP32_BYTES
        return (self.own * self.stack.state_bytes - spared) / self.shards

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        moments = [self.in_block(), self.at_end(), *([self.at_loss()] if self.has_head else [])]
        return max(moments, key=lambda moment: moment.total)

    @property
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
    def micro_batches(self) -> int:
        """Of a step."""
        return self.layout.micro_batches(self.batch_size)

    @property
    def waiting(self) -> float:
        """Micro-batches that wait for their gradients of weights beside the newest."""
        return min(self.number, self.micro_batches) / self.layout.virtual_stages

    def at_loss(self) -> Moment:
        """Where the newest micro-batch's backward pass begins."""
        logits = logits_and_loss(self.model, self.stack, self.layout)
        inputs = head_inputs(self.model, self.stack, self.layout)
        return Moment(
            gathered=_gathered(self.model, self.stack, self.layout, self.own, 1),
            gradients=self._accumulated(),
            activations=self._kept(newest=0),
            working=logits + inputs,
        )

    def in_block(self) -> Moment:
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
            gathered=_gathered(self.model, self.stack, layout, self.own, 2),
            gradients=self._accumulated(),
            activations=self._kept(newest=1 if self.is_divided else 0),
            working=working,
        )

    def at_end(self) -> Moment:
        """Where the last backward pass ends."""
        flight = self._in_flight()
        return Moment(
            gathered=_gathered(self.model, self.stack, self.layout, self.own, 2),
            gradients=_reduced(self.model, self.stack, self.layout, self.own),
            activations=self._travelling(flight),
            working=block_activations(self.model, self.stack, self.layout),
        )

    def _in_flight(self) -> float:
        """Blocks times micro-batches."""
        stage = self.number - self.stack.extra_micro_batches
        return blocks_in_flight(self.model, self.layout, self.micro_batches, stage)

    def _travelling(self, flight: float) -> float:
        return travelling(
            self.model, self.stack, self.layout, self.micro_batches, flight, self.number
        )

    def _kept(self, *, newest: int) -> float:
        """Of all micro-batches in flight; of the newest one's head, too, where that is 1."""
        model, stack, layout, flight = self.model, self.stack, self.layout, self._in_flight()
        block = block_activations(model, stack, layout)
        kept = kept_activations(model, stack, layout, block) * flight + self._travelling(flight)
        if self.number == 0:
            normed = normed_embeddings(model, stack, layout)
            kept += normed * flight / layout.layers_of_stage(model.layers)
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
        return waiting_gradients(self.model, self.stack, self.layout)

    def _accumulated(self) -> float:
        if self.goes_forward_first:
            return 0.0
        return _accumulated(self.stack, self.layout, self.own, self.micro_batches)


def _gathered(model: ModelSpec, stack: Stack, layout: Layout, own: float, blocks: int) -> float:
    """FSDP2 holds the block that is computed, the message of the next one, and what is outside of
    blocks; a lone shard is copied, too. At the loss it holds the last block alone."""
    if stack.sharding != "all" or not layout.reshard:
        return own * stack.element_bytes
    ahead, outside = _buckets(model, layout, own, blocks)
    return (ahead + outside) * stack.element_bytes


def _accumulated(stack: Stack, layout: Layout, own: float, micro_batches: int) -> float:
    """Gradients where a backward pass begins: those of the micro-batches before it, whole where
    they are reduced once a step, else this shard's."""
    if stack.sharding != "all":
        return own * stack.gradient_bytes
    if not stack.accumulates or micro_batches == 1:
        return 0.0
    parts = layout.shards if layout.gradient_sync == "micro_batch" else 1
    return own / parts * stack.gradient_bytes


def _reduced(model: ModelSpec, stack: Stack, layout: Layout, own: float) -> float:
    """Gradients where the last backward pass ends: this shard's, and those on their way, as they
    are and as a message."""
    if stack.sharding != "all":
        return own * stack.gradient_bytes
    ahead, outside = _buckets(model, layout, own, 2)
    on_their_way = max(ahead, outside) * (stack.gradient_bytes + stack.reduced_bytes)
    return own / layout.shards * stack.gradient_bytes + on_their_way


def _buckets(model: ModelSpec, layout: Layout, own: float, most: int) -> tuple[float, float]:
    """Parameters of so many blocks, and of what is outside of blocks."""
    block = model.block_parameters / layout.tensor
    blocks = layout.layers_of_stage(model.layers) * block
    return min(blocks, most * block), max(0.0, own - blocks)
