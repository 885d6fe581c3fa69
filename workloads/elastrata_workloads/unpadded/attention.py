"""Attention over segments laid end to end, without padding.

T: tokens of the micro-batch; H: heads; K: heads of key and value, a divisor of H; D: size of a
head; G: segments.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.kernel import Kernel, has_varlen, shares_heads
from elastrata_workloads.unpadded.runs import by_runs, compiled_by_runs
from elastrata_workloads.unpadded.windows import sees_all

_SHARES_HEADS = shares_heads(varlen_attn)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    kernel: Kernel = "auto",
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Scaled dot-product attention of every token to the tokens of its own segment.

    Vaswani et al. 2017, equation 1, once per segment and head. Where key and value have fewer
    heads, each of theirs serves H / K neighbouring ones of the query (Ainslie et al. 2023,
    arXiv 2305.13245).

    Args:
        query: shape [T, H, D].
        key: shape [T, K, D]; so is value.
        value: see key.
        segments: cover all T tokens.
        kernel: dense, or else varlen where there is one for these tensors.
        causal: whether a token attends to itself and those before it only.
        window: tokens to each side that it attends to at most (Beltagy et al. 2020,
            arXiv 2004.05150); None: all.

    Returns:
        Shape [T, H, D].
    """
    is_grouped = query.shape[1] != key.shape[1]
    if kernel == "dense" or not has_varlen(_capability(query), query.dtype):
        if window is not None and is_grouped:
            key, value = (_for_each_head(query, shared) for shared in (key, value))
        return _dense(query, key, value, segments, causal, window)
    options: dict[str, Any] = {}
    if is_grouped and _SHARES_HEADS:
        options["enable_gqa"] = True
    elif is_grouped:
        key, value = (_for_each_head(query, shared) for shared in (key, value))
    return cast(
        Tensor,
        varlen_attn(
            query,
            key,
            value,
            segments.offsets,
            segments.offsets,
            segments.longest,
            segments.longest,
            window_size=_window(causal, window),
            **options,
        ),
    )


def _window(causal: bool, window: int | None) -> tuple[int, int]:
    """Tokens before and behind, -1: all."""
    reach = -1 if window is None else window
    return reach, 0 if causal else reach


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    causal: bool,
    window: int | None,
) -> Tensor:
    if query.is_cuda:
        form: Any = _outside_of_graphs
        return cast(Tensor, form(query, key, value, segments.lengths, causal, window))
    # In windows the node of graphs is faster without one, too: by a quarter, forward and backward.
    if not torch.compiler.is_compiling() and sees_all(max(segments.lengths), window):
        return by_runs(query, key, value, segments.lengths, causal, window)
    if query.shape[1] != key.shape[1]:
        key, value = (_for_each_head(query, shared) for shared in (key, value))
    out: Tensor = compiled_by_runs(query, key, value, segments.offsets, causal, window)[0]
    return out


_outside_of_graphs = torch.compiler.disable(by_runs)  # type: ignore[no-untyped-call]


def _for_each_head(query: Tensor, shared: Tensor) -> Tensor:
    """Key or value of shape [T, K, D] as [T, H, D]."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _capability(query: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(query.device) if query.is_cuda else None
