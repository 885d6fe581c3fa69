"""Bytes of activations and their gradients that blocks, embeddings and the head keep.

Letters: h hidden size, f feed-forward size, e bytes of an activation, p stages of a pipeline, v
parts of the model on each of its devices.
"""

from __future__ import annotations

from elastrata.planner.layout import Layout
from elastrata.planner.stack import FP32_BYTES, Stack
from elastrata.workload.model_spec import ModelSpec


def block_activations(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes that a block keeps for the backward pass of one micro-batch.

    The count follows arXiv 2205.05198, section 4.1, for the operations of each kind of block.
    Unless tokens are divided, every tensor-parallel device keeps whole: the inputs of both norms,
    of the query, key and value projections and of the first feed-forward matrix, and the dropout
    masks. Tensor-parallel devices divide the rest: query, key, value, attention's result and the
    feed-forward's inner activations.
    """
    e, h, f = stack.element_bytes, model.hidden, model.feed_forward
    shared = 4 * e * h + (2 if stack.dropout else model.dropouts) * h
    inner = (3 if stack.fused else 4) * f if model.gated else 2 * f
    own = e * ((2 + stack.attention_copies) * model.width + 2 * model.kv_width + inner)
    if model.qk_norm:
        own += e * (model.width + model.kv_width)  # query and key before the norm as well
    if stack.flash:
        # Flash attention keeps one log-sum-exp per head and token, not the scores.
        own += FP32_BYTES * model.heads
    else:
        own += model.heads * model.seq_len * (2 * e + (1 if stack.dropout else 0))
    parts = layout.tensor if layout.sequence else 1
    # torch's tensor parallelism keeps the two gathered inputs (of query, key and value, and of the
    # first feed-forward matrix) whole instead of gathering them again.
    gathered = 2 * e * h * (1 - 1 / parts) if stack.keeps_gathered else 0.0
    tokens = layout.micro_batch * model.seq_len
    return tokens * (shared / parts + gathered + _rotary_bytes(model, stack) + own / layout.tensor)


def _rotary_bytes(model: ModelSpec, stack: Stack) -> float:
    """Return the bytes per token of rotary sines and cosines: one of each for two features of a
    head. The rotated tensors are not kept."""
    is_rotary = model.position_rows == 0
    return 2 * FP32_BYTES * model.head_width if is_rotary and not stack.fused else 0.0


def micro_batches_in_flight(layout: Layout, micro_batches: int, stage: int) -> float:
    """Return the number of micro-batches whose activations a stage holds simultaneously.

    GPipe holds all micro-batches. 1F1B holds one for each stage from this one to the last.
    Interleaved 1F1B holds (p - 1) / v more on the first device (arXiv 2104.04473, section 2.2;
    arXiv 2205.05198, section 4.2.3) and 2 / v fewer on each following one. Zero bubble as
    implemented in torch.distributed holds p on every stage: the p - `stage` of 1F1B, and `stage`
    more that wait for their weight gradients (arXiv 2401.10241, ZB-H1).
    """
    if layout.pipeline == 1:
        return 1
    if layout.schedule == "gpipe":
        return micro_batches
    p, v = layout.pipeline, layout.virtual_stages
    in_flight: float = p - stage
    if layout.schedule == "zero_bubble":
        in_flight = p
    elif v > 1:
        in_flight = p + (p - 1 - 2 * stage) / v
    return min(in_flight, micro_batches)


def hidden_state_buffers(
    model: ModelSpec,
    stack: Stack,
    layout: Layout,
    micro_batches: int,
    in_flight: float,
    stage: int,
) -> float:
    """Return the bytes of hidden states that a stage receives from and sends to other stages."""
    if layout.pipeline == 1:
        return 0.0
    parts = layout.tensor if layout.sequence else 1
    # torch.distributed's pipelines receive each micro-batch of a step into a separate buffer, and
    # keep sent hidden states until their gradient returns.
    hidden = layout.micro_batch * model.seq_len * model.hidden * stack.element_bytes / parts
    before = layout.virtual_stages - (stage == 0)
    behind = layout.virtual_stages - (stage == layout.pipeline - 1)
    # The inputs of micro-batches in flight are counted among the activations of blocks.
    received = (micro_batches - in_flight) * before
    return hidden * (received + micro_batches * behind + in_flight * behind)


def deferred_gradient_bytes(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes of output gradients of a block's matrices and norms for one micro-batch,
    from which zero bubble computes the weight gradients later."""
    inner = (2 if model.gated else 1) * model.feed_forward
    own = 2 * model.hidden + model.width + 2 * model.kv_width + inner
    if model.qk_norm:
        own += model.width + model.kv_width
    tokens = layout.micro_batch * model.seq_len * stack.element_bytes
    whole = 2 * model.hidden / (layout.tensor if layout.sequence else 1)
    return tokens * (own / layout.tensor + whole)


def saved_activations(model: ModelSpec, stack: Stack, layout: Layout, block: float) -> float:
    """Return the bytes of a block that are kept for the backward pass.

    Without checkpointing a block keeps all of them, with `full` its input, and with `selective` its
    input and the results that `parallel/activation_checkpointing.py` saves.
    """
    if layout.checkpointing == "none":
        return block
    tokens, parts = layout.micro_batch * model.seq_len, layout.tensor if layout.sequence else 1
    hidden = tokens * model.hidden * stack.element_bytes
    if layout.checkpointing == "full":
        return hidden / parts
    return min(block, hidden / parts + tokens * _kept_results(model, stack, layout))


def _kept_results(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes per token that `selective` keeps beyond the input of a block.

    These are attention's result and every second matrix product: query, value, the first
    feed-forward product and, in a gated block, the last one, which is whole on every
    tensor-parallel device. Tensor-parallel devices also keep the two reduced sums.
    """
    e, h = stack.element_bytes, model.hidden
    own = e * (2 * model.width + model.kv_width + model.feed_forward) + FP32_BYTES * model.heads
    last = e * h if model.gated else 0
    sums = 2 * e * h / (layout.tensor if layout.sequence else 1) if layout.tensor > 1 else 0
    return own / layout.tensor + last + sums


def logits_and_loss(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes of one micro-batch's logits, including temporaries of the loss."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    logits = tokens * model.vocabulary / (1 if stack.whole_logits else layout.tensor)
    return logits * stack.logit_bytes + min(logits, stack.logits_at_once) * FP32_BYTES


def recomputed_activations(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes of recomputed activations during a block's backward pass."""
    if layout.checkpointing == "none":
        return 0.0
    block = block_activations(model, stack, layout)
    again = max(0.0, block - saved_activations(model, stack, layout, block))
    if layout.checkpointing == "full" or not model.gated:
        return again
    # `selective` saves the last product of a gated feed-forward, which the backward pass never
    # reads.
    return again + layout.micro_batch * model.seq_len * model.hidden * stack.element_bytes


def backward_gradients(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes of gradients that coexist inside a block during its backward pass.

    They are the gradients of the feed-forward's inner activations and of the block's output. In a
    gated block they are those of both factors and of their product; the product itself has been
    freed, so two of the three count.
    """
    parts = layout.tensor if layout.sequence and not stack.keeps_gathered else 1
    inner = (2 if model.gated else 1) * model.feed_forward
    numbers = inner / layout.tensor + model.hidden / parts
    return layout.micro_batch * model.seq_len * numbers * stack.element_bytes


def saved_gate_product(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes of the product of a gated feed-forward's two factors. Zero bubble keeps it
    to compute weight gradients later."""
    inner = model.feed_forward / layout.tensor if model.gated else 0.0
    return layout.micro_batch * model.seq_len * inner * stack.element_bytes


def head_inputs(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes of hidden states of predicted tokens that the head keeps for one
    micro-batch."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    return tokens * model.head_states * model.hidden * stack.element_bytes


def head_activations(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes of logits and inputs that the head keeps for one micro-batch until its
    backward pass."""
    tokens = layout.micro_batch * model.seq_len * model.predicted
    columns = model.vocabulary / (1 if stack.whole_logits else layout.tensor)
    return tokens * columns * stack.element_bytes + head_inputs(model, stack, layout)


def embedding_norm_activations(model: ModelSpec, stack: Stack, layout: Layout) -> float:
    """Return the bytes that a norm of the embeddings keeps for one micro-batch: their sum, whole on
    every tensor-parallel device. A first block without a norm reduces this."""
    hidden = layout.micro_batch * model.seq_len * model.hidden * stack.element_bytes
    kept = hidden if model.embedding_norm else 0.0
    if model.first_norm or layout.checkpointing != "none":
        return kept
    # `block_activations` counts two norms in every block, but the first block here has one.
    return kept - hidden / (layout.tensor if layout.sequence else 1)
