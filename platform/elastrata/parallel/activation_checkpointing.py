"""Activation checkpointing: which activations of a block are kept for its backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Recomputation = Literal["none", "selective", "full"]
RECOMPUTED: Mapping[Recomputation, float] = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Approximate share of a block's forward pass that its backward pass recomputes."""
_Forward = Callable[..., Any]
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT_OPS = frozenset(
    {
        # Attention: the only result whose cost per token grows with the sample's length.
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "elastrata::attention_by_runs",
        # Sums over ranks of tensor parallelism: recomputing them would repeat the messages.
        "_c10d_functional::all_reduce",
        "_c10d_functional::reduce_scatter_tensor",
    }
)
_MATMUL_OPS = frozenset({"aten::mm", "aten::addmm"})


def initial_recomputation(policy: Recomputation | Literal["auto"]) -> Recomputation:
    """Return the initial policy, used until `auto` chooses one."""
    return "none" if policy == "auto" else policy


def recompute(block: nn.Module, way: Recomputation, *, compile: bool = False) -> None:
    """Set which activations a block recomputes in its backward pass.

    With full, the block keeps its input only (Chen et al. 2016, arXiv 1604.06174). With selective,
    it also keeps the results of attention and of every second matrix product. The remaining
    operators, such as norms and activations, cost memory and hardly any time.

    It may be called again with another policy, between steps.
    """
    vars(block).pop("forward", None)
    forward = _compile(block.forward) if compile and way != "selective" else block.forward
    if way == "full":
        # Compile inside: torch does not compile functions that a checkpoint calls by itself.
        forward = partial(checkpoint, forward, use_reentrant=False)
    # Recomputing attention alone (Korthikanti et al. 2022, arXiv 2205.05198) would save little: no
    # kernel here keeps the scores, which grow with the square of the length.
    if way == "selective":
        forward = _checkpoint_selectively(forward)
        # Compile outside: the graph must include the choice of kept results.
        forward = _compile(forward) if compile else forward
    if compile or way != "none":
        block.forward = forward


def _compile(forward: _Forward) -> _Forward:
    # Dynamic shapes from the start: unpadded micro-batches rarely have the same length.
    return torch.compile(forward, dynamic=True)


def _checkpoint_selectively(forward: _Forward) -> _Forward:
    def selective(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_selective_contexts)

    return selective


def _selective_contexts() -> _Contexts:
    """Return the contexts of one block's forward pass and of its recomputation."""
    # Forward pass and recomputation count their matrix products separately.
    matmuls = Counter[bool]()

    def policy(
        context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = op.name()
        if name in _MATMUL_OPS:
            matmuls[context.is_recompute] += 1
        # Every second product: half of the recomputation, for about half of the memory.
        is_odd = matmuls[context.is_recompute] % 2 == 1
        keep = name in _KEPT_OPS or (name in _MATMUL_OPS and is_odd)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: _Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
