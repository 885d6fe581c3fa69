"""Bytes on the device that needs most of them, term by term.

Letters: T tokens of the micro-batch, h hidden size, f feed-forward size, t tensor-parallel devices,
e bytes of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.hardware import Device
from elastrata.planner.layout import Layout
from elastrata.planner.stack import FP32_BYTES, Stack


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
    stages = [_first_stage, _last_stage] if layout.pipeline > 1 else [_only_stage]
    needs = [stage(model, device, stack, layout, batch_size) for stage in stages]
    return max(needs, key=lambda need: need.total)


def block_activations(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Bytes that a block keeps for the backward pass of one micro-batch.

    As in arXiv 2205.05198, section 4.1, counted for the operations of each kind of block. What
    every tensor-parallel device keeps whole, unless tokens are divided: inputs of the two norms, of
    the projections to query, key and value and of the feed-forward's first. What they divide:
    query, key, value, attention's result, and the feed-forward's inner numbers.
    """
    e, h, f = stack.element_bytes, model.hidden, model.feed_forward
    shared = 4 * e * h + (2 * h if stack.dropout else 0)
    inner = (3 if stack.fused else 4) * f if model.gated else 2 * f
    own = e * ((2 + stack.attention_copies) * h + 2 * model.kv_width + inner)
    if model.position_rows == 0 and not stack.fused:
        own += e * (h + model.kv_width)  # query and key before they were turned
    if stack.flash:
        own += FP32_BYTES * model.heads
    else:
        own += model.heads * model.seq_len * (2 * e + (1 if stack.dropout else 0))
    parts = layout.tensor if layout.sequence else 1
    tokens = layout.micro_batch * model.seq_len
    return tokens * (shared / parts + own / layout.tensor)


def blocks_in_flight(model: ModelSpec, layout: Layout, micro_batches: int, stage: int) -> float:
    """Blocks times micro-batches whose activations a stage holds at once.

    GPipe holds all micro-batches; 1F1B, and ZB-H1, as many as there are stages from here to the
    end; interleaved stages (p - 1) / (p v) more than these (arXiv 2104.04473, section 2.2;
    arXiv 2205.05198, section 4.2.3).
    """
    layers = layout.layers_of_stage(model.layers)
    if layout.pipeline == 1:
        return layers
    if layout.schedule == "gpipe":
        return layers * micro_batches
    p, v = layout.pipeline, layout.virtual_stages
    held = p - stage + ((p - 1) / v if v > 1 else 0)
    held += layout.schedule == "zero_bubble"  # its gradients of weights are yet to come
    return layers * min(held, micro_batches)


def _only_stage(
    model: ModelSpec, device: Device, stack: Stack, layout: Layout, batch_size: int
) -> Memory:
    numbers = float(model.parameters)
    return _stage(model, device, stack, layout, batch_size, numbers, 0, has_head=True)


def _first_stage(
    model: ModelSpec, device: Device, stack: Stack, layout: Layout, batch_size: int
) -> Memory:
    blocks = layout.layers_of_stage(model.layers) * model.block_parameters
    numbers = float(blocks + model.embedding_parameters)
    return _stage(model, device, stack, layout, batch_size, numbers, 0, has_head=False)


def _last_stage(
    model: ModelSpec, device: Device, stack: Stack, layout: Layout, batch_size: int
) -> Memory:
    blocks = layout.layers_of_stage(model.layers) * model.block_parameters
    extra = model.head_extra + model.sample_extra
    numbers = float(blocks + model.vocabulary * model.hidden + extra)
    stage = layout.pipeline - 1
    return _stage(model, device, stack, layout, batch_size, numbers, stage, has_head=True)


def _stage(
    model: ModelSpec,
    device: Device,
    stack: Stack,
    layout: Layout,
    batch_size: int,
    numbers: float,
    stage: int,
    *,
    has_head: bool,
) -> Memory:
    """Memory of a stage with so many undivided parameters: where its backward pass begins,
    or where it ends, whichever needs more."""
    own = numbers / layout.tensor
    micro_batches = layout.micro_batches(batch_size)
    flight = blocks_in_flight(model, layout, micro_batches, stage - stack.extra_micro_batches)
    travelling = _travelling(model, stack, layout, micro_batches, flight, stage)
    block = block_activations(model, stack, layout)
    logits = _logits(model, stack, layout) if has_head else 0.0
    kept = _kept(model, stack, layout, block)
    again = 0.0 if layout.checkpointing == "none" else max(0.0, block - kept)
    shards = layout.shards if stack.sharding != "none" else 1
    state = own * stack.state_bytes / shards
    gathered = _gathered(model, stack, layout, own)
    all_forward_first = layout.pipeline > 1 and layout.schedule == "gpipe"
    heads = _heads(model, stack, layout) * (micro_batches - 1) if all_forward_first else 0.0
    begins = (
        0.0 if all_forward_first else _accumulated(stack, layout, own, micro_batches),
        kept * flight + travelling + _waiting(model, stack, layout) + heads * has_head,
        max(logits, again + _backward(model, stack, layout)),
    )
    ends = (_reduced(model, stack, layout, own), travelling, block)
    gradients, activations, working = max(begins, ends, key=sum)
    return Memory(
        parameters=state,
        gathered=gathered,
        gradients=gradients,
        activations=activations,
        working=working,
        reserved=device.reserved_bytes,
        fragmentation=stack.fragmentation * (state + gathered + gradients + activations + working),
        building=FP32_BYTES * (own / shards + _largest_parameter(model)),
    )


def _largest_parameter(model: ModelSpec) -> int:
    """Numbers of the largest parameter: the table of tokens, or a feed-forward's matrix."""
    return model.hidden * max(model.vocabulary, model.feed_forward)


def _travelling(
    model: ModelSpec,
    stack: Stack,
    layout: Layout,
    micro_batches: int,
    flight: float,
    stage: int,
) -> float:
    """Hidden states that come from other stages, and those that go there. torch.distributed's
    pipelines receive into memory of its own for each micro-batch of a step, and keep what a stage
    has sent until the gradient of it is back."""
    if layout.pipeline == 1:
        return 0.0
    parts = layout.tensor if layout.sequence else 1
    hidden = layout.micro_batch * model.seq_len * model.hidden * stack.element_bytes / parts
    before = layout.virtual_stages - (stage == 0)
    behind = layout.virtual_stages - (stage == layout.pipeline - 1)
    in_flight = flight / layout.layers_of_stage(model.layers)
    received = (micro_batches - in_flight) * before  # the others are inputs that blocks keep
    return hidden * (received + micro_batches * behind + in_flight * behind)


def _waiting(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Gradients of what every matrix and norm of a stage has made of one micro-batch: zero bubble
    computes those of the weights from them, later."""
    if layout.schedule != "zero_bubble" or layout.pipeline == 1:
        return 0.0
    inner = (2 if model.gated else 1) * model.feed_forward
    own = 3 * model.hidden + 2 * model.kv_width + inner
    tokens = layout.micro_batch * model.seq_len * stack.element_bytes
    whole = 2 * model.hidden / (layout.tensor if layout.sequence else 1)
    return layout.layers_of_stage(model.layers) * tokens * (own / layout.tensor + whole)


def _kept(model: ModelSpec, stack: Stack, layout: Layout, block: float) -> float:
    """Bytes of a block kept for the backward pass: all, its input alone, or with that what
    `selective` keeps (`core/recomputation.py`)."""
    if layout.checkpointing == "none":
        return block
    tokens, parts = layout.micro_batch * model.seq_len, layout.tensor if layout.sequence else 1
    hidden = tokens * model.hidden * stack.element_bytes
    if layout.checkpointing == "full":
        return hidden / parts
    return min(block, hidden / parts + tokens * _kept_results(model, stack, layout))


def _kept_results(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Bytes per token of attention's result and of every second matrix product: query, value, the
    feed-forward's first and, where it has three, its last, which is whole on every tensor-parallel
    device; and there of the two sums over them."""
    e, h = stack.element_bytes, model.hidden
    own = e * (2 * h + model.kv_width + model.feed_forward) + FP32_BYTES * model.heads
    last = e * h if model.gated else 0
    sums = 2 * e * h / (layout.tensor if layout.sequence else 1) if layout.tensor > 1 else 0
    return own / layout.tensor + last + sums


def _logits(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Logits of one micro-batch, with what the loss makes of them."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    logits = tokens * model.vocabulary / (1 if stack.whole_logits else layout.tensor)
    return logits * stack.logit_bytes + min(logits, stack.logits_at_once) * FP32_BYTES


def _backward(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Gradients at once inside a block: of its feed-forward's inner numbers, and of its output."""
    parts = layout.tensor if layout.sequence else 1
    numbers = model.feed_forward / layout.tensor + model.hidden / parts
    return layout.micro_batch * model.seq_len * numbers * stack.element_bytes


def _heads(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """What the head keeps of one micro-batch until its backward pass: logits, and its input before
    and after the norm."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    columns = model.vocabulary / (1 if stack.whole_logits else layout.tensor)
    return tokens * (columns + 2 * model.hidden) * stack.element_bytes


def _gathered(model: ModelSpec, stack: Stack, layout: Layout, own: float) -> float:
    """FSDP2 holds the block that is computed, the message of the next one, and what is outside of
    blocks; a lone shard is copied, too."""
    if stack.sharding != "all":
        return own * stack.element_bytes
    if not layout.reshard:
        return own * stack.element_bytes
    ahead, outside = _buckets(model, layout, own)
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
    ahead, outside = _buckets(model, layout, own)
    on_their_way = max(ahead, outside) * (stack.gradient_bytes + stack.reduced_bytes)
    return own / layout.shards * stack.gradient_bytes + on_their_way


def _buckets(model: ModelSpec, layout: Layout, own: float) -> tuple[float, float]:
    """Parameters of two blocks, and of what is outside of blocks."""
    block = model.block_parameters / layout.tensor
    blocks = layout.layers_of_stage(model.layers) * block
    return min(blocks, 2 * block), max(0.0, own - blocks)
