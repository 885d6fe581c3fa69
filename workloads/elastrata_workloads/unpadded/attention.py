"""Self-attention: projections to heads, rotary positions, and the attention between tokens.

Shapes: T tokens of the micro-batch, H heads, K heads of key and value, D = E / H, E hidden size.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from typing_extensions import override

from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.shapes import (
    AttentionShape,
    Kernel,
    RotaryScaling,
    has_varlen,
    shares_heads,
)
from elastrata_workloads.unpadded.windows import attend_by_runs, attend_by_runs_compiled, sees_all


def rotate(
    heads: Tensor, positions: Tensor, base: float, scaling: RotaryScaling | None = None
) -> Tensor:
    """Rotate every head by angles that grow with the position (Su et al. 2021, arXiv 2104.09864).

    Feature i of the first half of a head and feature i of the second half form a pair, which is
    rotated by position * base^(-2 i / D). This is the weight layout of transformers.

    Args:
        heads: shape [T, H, D], D even.
        positions: shape [T], int64: position of each token in its segment.
        base: the slowest pair takes about 2 pi * base positions for one rotation.
        scaling: slows the slow pairs; None: all rotate as above.
    """
    size = heads.shape[-1]
    exponents = torch.arange(0, size, 2, device=heads.device, dtype=torch.float32) / size
    frequencies = 1.0 / base**exponents
    if scaling is not None:
        frequencies = _slow_down(frequencies, scaling)
    angles = (positions[:, None] * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    # In fp32: bf16 cannot distinguish neighbouring positions.
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def _slow_down(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Return the frequencies of Llama 3.1: between the two factors, those of the slowed and of the
    plain pair are mixed in proportion."""
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    plain = ((rotations - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - plain) * frequencies / scaling.factor + plain * frequencies


# Older versions of torch have no `enable_gqa`: key and value are repeated instead.
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
    """Return scaled dot-product attention of every token to the tokens of its segment.

    Vaswani et al. 2017, equation 1, once per segment and head. If key and value have fewer heads,
    each of these serves H / K neighbouring query heads (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        query: shape [T, H, D].
        key: shape [T, K, D].
        value: shape [T, K, D].
        segments: cover all T tokens.
        kernel: "dense"; any other value uses varlen if device, dtype and D permit it, else dense.
        causal: whether a token attends only to itself and to earlier tokens.
        window: maximum distance of attended tokens, to each side unless causal (Beltagy et al.
            2020, arXiv 2004.05150); None: no limit.

    Returns:
        Shape [T, H, D].
    """
    is_grouped = query.shape[1] != key.shape[1]
    if kernel == "dense" or not has_varlen(_capability(query), query.dtype, query.shape[-1]):
        # `within` requires as many key and value heads as query heads.
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
    """Return the number of attended tokens before and after a token; -1 means all."""
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
        # Outside of compiled graphs, which would be recompiled for every list of lengths.
        form: Any = _outside_of_graphs
        return cast(Tensor, form(query, key, value, segments.lengths, causal, window))
    # With windows, the custom operator is faster than `attend_by_runs` in eager mode, too: by a
    # quarter, forward and backward.
    if not torch.compiler.is_compiling() and sees_all(max(segments.lengths), window):
        return attend_by_runs(query, key, value, segments.lengths, causal, window)
    if query.shape[1] != key.shape[1]:
        key, value = (_for_each_head(query, shared) for shared in (key, value))
    out: Tensor = attend_by_runs_compiled(query, key, value, segments.offsets, causal, window)[0]
    return out


_outside_of_graphs = torch.compiler.disable(attend_by_runs)  # type: ignore[no-untyped-call]


def _for_each_head(query: Tensor, shared: Tensor) -> Tensor:
    """Expand key or value from shape [T, K, D] to [T, H, D]."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _capability(query: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(query.device) if query.is_cuda else None


class SelfAttention(nn.Module):
    """Query, key and value projections, and the attention over them."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.hidden_size, shape.width, bias=shape.bias)
        self.key = nn.Linear(shape.hidden_size, shape.kv_width, bias=shape.bias)
        self.value = nn.Linear(shape.hidden_size, shape.kv_width, bias=shape.bias)
        norm = shape.head_norm
        self.query_norm = norm.over(shape.head_size) if norm else None
        self.key_norm = norm.over(shape.head_size) if norm else None

    def forward(
        self, hidden: Tensor, segments: Segments, positions: Tensor | None = None
    ) -> Tensor:
        """Map shape [T, E] to [T, E]; rotary attention needs positions of shape [T]."""
        # -1: under tensor parallelism a rank holds some of the heads only.
        heads = (-1, self.shape.head_size)
        query = self.query(hidden).unflatten(-1, heads)
        key = self.key(hidden).unflatten(-1, heads)
        value = self.value(hidden).unflatten(-1, heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.shape.rotary_base is not None and positions is not None:
            turn = self.shape.rotary_base, self.shape.rotary_scaling
            query, key = rotate(query, positions, *turn), rotate(key, positions, *turn)
        attended = attention(
            query,
            key,
            value,
            segments,
            self.shape.kernel,
            causal=self.shape.causal,
            window=self.shape.window,
        )
        return attended.flatten(-2)


class ProjectedAttention(SelfAttention):
    """Self-attention with its output projection."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.output = nn.Linear(shape.width, shape.hidden_size, bias=shape.output_bias)

    @override
    def forward(
        self, hidden: Tensor, segments: Segments, positions: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.output(super().forward(hidden, segments, positions))
        return out
