"""Attention over segments laid end to end, without padding.

T: tokens of the micro-batch; H: heads; K: heads of key and value, a divisor of H; D: size of a
head; G: segments.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.kernel import Kernel, has_varlen


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    kernel: Kernel = "auto",
    *,
    causal: bool = False,
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

    Returns:
        Shape [T, H, D].
    """
    if kernel == "dense" or not has_varlen(_capability(query), query.dtype):
        out: Tensor = _by_runs(query, key, value, segments, causal)
        return out
    is_grouped = query.shape[1] != key.shape[1]
    attend = partial(varlen_attn, enable_gqa=True) if is_grouped else varlen_attn
    return cast(
        Tensor,
        attend(
            query,
            key,
            value,
            segments.offsets,
            segments.offsets,
            segments.longest,
            segments.longest,
            window_size=(-1, 0 if causal else -1),
        ),
    )


def _capability(query: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(query.device) if query.is_cuda else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_runs(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    """One dense attention call per run of equally long neighbours; rows come sorted by length.

    Padding neighbours of nearly equal length to share a call is slower, as
    `benchmarks/bert_attention.py` shows. Kept out of compiled graphs, which would be made anew for
    every list of lengths.
    """
    runs = [(len(list(run)), length) for length, run in groupby(segments.lengths)]
    sizes = [count * length for count, length in runs]
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for (count, length), *qkv in zip(
        runs, *(torch.split(x, sizes) for x in (query, key, value)), strict=True
    ):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)
