"""Bidirectional attention over segments laid end to end, without padding.

T: tokens of the micro-batch; H: heads; D: size of a head; G: segments.
"""

from __future__ import annotations

from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from elastrata_workloads.bert.batch import Segments
from elastrata_workloads.bert.kernel import Kernel, has_varlen


def attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, kernel: Kernel = "auto"
) -> Tensor:
    """Scaled dot-product attention of every token to all tokens of its own segment.

    Vaswani et al. 2017, equation 1, once per segment and head.

    Args:
        query: shape [T, H, D]; so are key and value.
        segments: cover all T tokens.
        kernel: dense, or else varlen where there is one for these tensors.

    Returns:
        Shape [T, H, D].
    """
    if kernel == "dense" or not has_varlen(_capability(query), query.dtype):
        out: Tensor = _by_runs(query, key, value, segments)
        return out
    offsets, longest = segments.offsets, segments.longest
    return cast(Tensor, varlen_attn(query, key, value, offsets, offsets, longest, longest))


def _capability(query: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(query.device) if query.is_cuda else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_runs(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """One dense attention call per run of equally long neighbours; rows come sorted by length.

    Padding neighbours of nearly equal length to share a call is slower, as
    `benchmarks/bert_attention.py` shows. Kept out of compiled graphs, which would be made anew for
    every list of lengths.
    """
    runs = [(len(list(run)), length) for length, run in groupby(segments.lengths)]
    sizes = [count * length for count, length in runs]
    parts = []
    for (count, length), *qkv in zip(
        runs, *(torch.split(x, sizes) for x in (query, key, value)), strict=True
    ):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in qkv)
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)
