"""Activation checkpointing: what of a block is kept for its backward pass, and what is computed
again there."""

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
"""The share of a block's forward pass, about, that its backward pass computes again."""
_Forward = Callable[..., Any]
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT = frozenset(
    {
        # Attention: the one result whose cost grows with the length of the sample.
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "elastrata::attention_by_runs",
        # Sums over the ranks that compute a sample together: they would be sent again.
        "_c10d_functional::all_reduce",
        "_c10d_functional::reduce_scatter_tensor",
    }
)
_MATMULS = frozenset({"aten::mm", "aten::addmm"})


def way_at_first(policy: Recomputation | Literal["auto"]) -> Recomputation:
    """The policy that blocks have until one is chosen."""
    return "none" if policy == "auto" else policy


def recompute(block: nn.Module, way: Recomputation, *, compile: bool = False) -> None:
    """Has a block compute again, in its backward pass, what it does not keep of its forward pass.

    full: it keeps its input only (Chen et al. 2016, arXiv 1604.06174). selective: also the results
    of attention and of every second matrix product; what lies between them, such as norms and
    activations, costs memory and hardly any time. Recomputing attention alone, as Korthikanti et
    al. 2022 (arXiv 2205.05198) do, would save little here: neither kernel keeps the scores, which
    is what grows with the square of the length.

    May be called again, between steps, with another way."""
    vars(block).pop("forward", None)
    forward = _compiled(block.forward) if compile and way != "selective" else block.forward
    if way == "full":
        # Inside: torch compiles nothing that a checkpoint calls but what is told to be compiled.
        forward = partial(checkpoint, forward, use_reentrant=False)
    if way == "selective":
        forward = _selectively(forward)
        # Around it: what of a graph is kept must be known where the graph is made.
        forward = _compiled(forward) if compile else forward
    if compile or way != "none":
        block.forward = forward


def _compiled(forward: _Forward) -> _Forward:
    # Dynamic shapes from the start: unpadded micro-batches are hardly ever of one length.
    return torch.compile(forward, dynamic=True)


def _selectively(forward: _Forward) -> _Forward:
    def selective(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_selective)

    return selective


def _selective() -> _Contexts:
    """For the forward pass of one block, and for its recomputation."""
    matmuls = Counter[bool]()

    def policy(
        context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = op.name()
        if name in _MATMULS:
            matmuls[context.is_recompute] += 1
        is_odd = matmuls[context.is_recompute] % 2 == 1
        keep = name in _KEPT or (name in _MATMULS and is_odd)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: _Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
