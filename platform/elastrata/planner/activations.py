"""Activations and their gradients, byte by byte: what blocks, embeddings and the head keep.

Letters: h hidden size, f feed-forward size, t tensor-parallel devices, e bytes of an activation,
p stages of a pipeline, v parts of the model on each of its devices.
"""

from __future__ import annotations

from elastrata.planner.layout import Layout
from elastrata.planner.stack import FP32_BYTES, Stack
from elastrata.workload.model_spec import ModelSpec


def block_activations(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Bytes that a block keeps for the backward pass of one micro-batch.

    As in arXiv 2205.05198, section 4.1, counted for the operations of each kind of block. What
    every tensor-parallel device keeps whole, unless tokens are divided: inputs of the two norms, of
    the projections to query, key and value and of the feed-forward's first, and masks of dropout.
    What they divide: query, key, value, attention's result, and the feed-forward's inner numbers.
    """
    e, h, f = stack.element_bytes, model.hidden, model.feed_forward
    shared = 4 * e * h + (2 if stack.dropout else model.dropouts) * h
    inner = (3 if stack.fused else 4) * f if model.gated else 2 * f
    own = e * ((2 + stack.attention_copies) * h + 2 * model.kv_width + inner)
    if model.qk_norm:
        own += e * (h + model.kv_width)  # ... and before they were normalised
    if stack.flash:
        own += FP32_BYTES * model.heads
    else:
        own += model.heads * model.seq_len * (2 * e + (1 if stack.dropout else 0))
    parts = layout.tensor if layout.sequence else 1
    # Inputs of the projections to query, key and value and of the feed-forward's first are whole.
    gathered = 2 * e * h * (1 - 1 / parts) if stack.keeps_gathered else 0.0
    tokens = layout.micro_batch * model.seq_len
    return tokens * (shared / parts + gathered + _waves(model, stack) + own / layout.tensor)


def _waves(model: ModelSpec, stack: Stack) -> float:
    """Bytes per token of the sines and cosines that query and key are turned by, one of each for
    two features of a head; what is turned is not kept."""
    is_rotary = model.position_rows == 0
    return 2 * FP32_BYTES * model.hidden / model.heads if is_rotary and not stack.fused else 0.0


def micro_batches_in_flight(layout: Layout, micro_batches: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once.

    GPipe holds all micro-batches; 1F1B as many as there are stages from here to the end;
    interleaved stages of the first device (p - 1) / v more than these (arXiv 2104.04473, section
    2.2; arXiv 2205.05198, section 4.2.3), of every one after it 2 / v less. Zero bubble, as
    torch.distributed has it, holds p everywhere: what 1F1B holds, and what waits for its gradients
    of weights, of which the stage's number says how many (arXiv 2401.10241, ZB-H1).
    """
    if layout.pipeline == 1:
        return 1
    if layout.schedule == "gpipe":
        return micro_batches
    p, v = layout.pipeline, layout.virtual_stages
    held: float = p - stage
    if layout.schedule == "zero_bubble":
        held = p
    elif v > 1:
        held = p + (p - 1 - 2 * stage) / v
    return min(held, micro_batches)


def travelling(
    model: ModelSpec,
    stack: Stack,
    layout: Layout,
    micro_batches: int,
    in_flight: float,
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
    received = (micro_batches - in_flight) * before  # the others are inputs that blocks keep
    return hidden * (received + micro_batches * behind + in_flight * behind)


def waiting_gradients(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Gradients of what every matrix and norm of a block has made of one micro-batch: zero bubble
    computes those of the weights from them, later."""
    inner = (2 if model.gated else 1) * model.feed_forward
    own = 3 * model.hidden + 2 * model.kv_width + inner
    if model.qk_norm:
        own += model.hidden + model.kv_width
    tokens = layout.micro_batch * model.seq_len * stack.element_bytes
    whole = 2 * model.hidden / (layout.tensor if layout.sequence else 1)
    return tokens * (own / layout.tensor + whole)


def kept_activations(model: ModelSpec, stack: Stack, layout: Layout, block: float) -> float:
    """Bytes of a block kept for the backward pass: all, its input alone, or with that what
    `selective` keeps (`parallel/activation_checkpointing.py`)."""
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


def logits_and_loss(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Logits of one micro-batch, with what the loss makes of them."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    logits = tokens * model.vocabulary / (1 if stack.whole_logits else layout.tensor)
    return logits * stack.logit_bytes + min(logits, stack.logits_at_once) * FP32_BYTES


def computed_again(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Bytes of a block that goes backward, beside what was kept of it: what it computes again. And
    with `selective` the feed-forward's last result, where it has three: nothing asks for it."""
    if layout.checkpointing == "none":
        return 0.0
    block = block_activations(model, stack, layout)
    again = max(0.0, block - kept_activations(model, stack, layout, block))
    if layout.checkpointing == "full" or not model.gated:
        return again
    return again + layout.micro_batch * model.seq_len * model.hidden * stack.element_bytes


def in_backward(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Gradients at once inside a block, beside what it keeps: of its feed-forward's inner numbers,
    with a gate of both factors and of their product, which itself is gone; and of its output."""
    parts = layout.tensor if layout.sequence and not stack.keeps_gathered else 1
    inner = (2 if model.gated else 1) * model.feed_forward
    numbers = inner / layout.tensor + model.hidden / parts
    return layout.micro_batch * model.seq_len * numbers * stack.element_bytes


def kept_product(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """The product of a gated feed-forward's two factors, where a backward pass keeps what it is
    done with: zero bubble computes the gradients of weights from that, later."""
    inner = model.feed_forward / layout.tensor if model.gated else 0.0
    return layout.micro_batch * model.seq_len * inner * stack.element_bytes


def head_inputs(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """What the head keeps of one micro-batch beside the logits: hidden states of predicted
    tokens."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    return tokens * model.head_states * model.hidden * stack.element_bytes


def head_activations(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """What the head keeps of one micro-batch until its backward pass: logits, and its inputs."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    columns = model.vocabulary / (1 if stack.whole_logits else layout.tensor)
    return tokens * columns * stack.element_bytes + head_inputs(model, stack, layout)


def normed_embeddings(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """What a norm of the embeddings keeps of one micro-batch: their sum, whole on every
    tensor-parallel device. Less what a first block without a norm does not keep."""
    hidden = layout.micro_batch * model.seq_len * model.hidden * stack.element_bytes
    kept = hidden if model.embedding_norm else 0.0
    if model.first_norm or layout.checkpointing != "none":
        return kept
    return kept - hidden / (layout.tensor if layout.sequence else 1)
