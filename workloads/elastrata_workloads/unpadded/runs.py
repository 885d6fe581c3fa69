"""Dense attention over segments laid end to end: a call for each run of equally long neighbours.

T: tokens of the micro-batch; H: heads; K: heads of key and value, a divisor of H; D: size of a
head; G: segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elastrata_workloads.unpadded.windows import Blocks, sees_all, within

_CPU = torch.ops.aten


def by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """One dense attention call per run of equally long neighbours; rows come sorted by length.

    Padding neighbours of nearly equal length to share a call is slower, as
    `benchmarks/bert_attention.py` shows.

    Args:
        query: shape [T, H, D].
        key: shape [T, K, D]; so is value.
        value: see key.
        lengths: of the G segments.
        causal: whether a token attends to itself and those before it only.
        window: tokens to each side that it attends to at most, where it is not causal and there are
            as many heads of each; None: all.

    Returns:
        Shape [T, H, D].
    """
    grouped = query.shape[1] != key.shape[1]

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if window is None or sees_all(q.shape[2], window):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return within(q, k, v, window)

    return _end_to_end([attended(*run) for run in _runs(lengths, query, key, value)])


@torch.library.custom_op("elastrata::attention_by_runs", mutates_args=(), device_types="cpu")
def compiled_by_runs(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """`by_runs` as one node of a compiled graph, which would else break there, or be made anew for
    every list of lengths. On CPUs; key and value have as many heads as query.

    Args:
        query: see `by_runs`.
        key: see `by_runs`.
        value: see `by_runs`.
        offsets: shape [G + 1]: starts of the segments, then T.
        causal: see `by_runs`.
        window: see `by_runs`.

    Returns:
        Shape [T, H, D]; and what the backward pass needs beside it, shape [T, H].
    """
    found = [
        _forward(*qkv, causal=causal, window=window)
        for qkv in _runs(offsets.diff().tolist(), query, key, value)
    ]
    return _end_to_end([out for out, _ in found]), _end_to_end([sums for _, sums in found])


def _forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """The result of a run, and the logarithms of its sums."""
    kernel = _CPU._scaled_dot_product_flash_attention_for_cpu
    if window is None or sees_all(query.shape[2], window):
        out, sums = kernel(query, key, value, is_causal=causal)
        return out, sums
    blocks, samples = Blocks(query.shape[2], window), query.shape[:2]
    parts = (blocks.of_queries(query), blocks.of_keys(key), blocks.of_keys(value))
    out, sums = kernel(*parts, attn_mask=_four_dims(blocks.mask(query)))
    return blocks.whole(out, samples), blocks.whole(sums, samples)


@torch.library.custom_op(
    "elastrata::attention_by_runs_backward", mutates_args=(), device_types="cpu"
)
def _compiled_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    offsets: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = [
        _gradients(*run, causal=causal, window=window)
        for run in _runs(offsets.diff().tolist(), gradient, query, key, value, out, sums)
    ]
    of_query, of_key, of_value = (_end_to_end(list(parts)) for parts in zip(*found, strict=True))
    return of_query, of_key, of_value


def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    *,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value of a run."""
    kernel = _CPU._scaled_dot_product_flash_attention_for_cpu_backward
    if window is None or sees_all(query.shape[2], window):
        of_query, of_key, of_value = kernel(gradient, query, key, value, out, sums, 0.0, causal)
        return of_query, of_key, of_value
    blocks, samples = Blocks(query.shape[2], window), query.shape[:2]
    of_query, of_key, of_value = kernel(
        blocks.of_queries(gradient),
        blocks.of_queries(query),
        blocks.of_keys(key),
        blocks.of_keys(value),
        blocks.of_queries(out),
        blocks.of_queries(sums),
        0.0,
        False,
        attn_mask=_four_dims(blocks.mask(query)),
    )
    whole = blocks.whole(of_query, samples)
    return whole, blocks.added_up(of_key, samples), blocks.added_up(of_value, samples)


def _four_dims(mask: Tensor) -> Tensor:
    """As the kernel itself wants them; `scaled_dot_product_attention` adds them."""
    return mask[(None,) * (4 - mask.ndim)]


def _runs(lengths: Sequence[int], *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The parts of tensors of shape [T, H, ...] that belong to each run of N segments of L tokens:
    shape [N, H, L, ...]."""
    runs = [(len(list(run)), length) for length, run in groupby(lengths)]
    sizes = [count * length for count, length in runs]
    for run, *parts in zip(runs, *(torch.split(x, sizes) for x in tensors), strict=True):
        yield [part.unflatten(0, run).transpose(1, 2) for part in parts]


def _end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `_runs`, of one tensor."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])


@compiled_by_runs.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


@_compiled_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, offsets, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*qkv, *output, offsets)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor | None, ...]:
    gradients = _compiled_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.window)
    return *gradients, None, None, None


compiled_by_runs.register_autograd(_backward, setup_context=_keep)
