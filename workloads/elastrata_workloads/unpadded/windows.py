"""Attention without padding on concatenated samples: within windows, and run by run.

N samples of L tokens; T: tokens of the micro-batch; G: segments; H: heads; K: heads of key and
value, a divisor of H; D: size of a head; W: window, tokens to each side; B: queries of a block; S:
keys that a block can attend to, B + 2 W; C: blocks of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this length a masked full attention costs no more than blocks.
_FULL_UP_TO = 6
"""Multiple of W up to which samples use full attention with a mask."""


def sees_all(length: int, window: int | None) -> bool:
    """Return whether every token of a sample is within the window of every other one."""
    return window is None or length <= window + 1


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, window: int, *, causal: bool = False
) -> Tensor:
    """Return scaled dot-product attention of every token to tokens at most `window` apart.

    Long samples are split into blocks of queries, each with the keys in its reach, as Longformer
    does (Beltagy et al. 2020, arXiv 2004.05150, section 3.1): the cost is linear in L.

    Args:
        query: shape [N, H, L, D].
        key: shape [N, H, L, D].
        value: shape [N, H, L, D].
        window: W.
        causal: whether a token attends only to itself and to earlier tokens.

    Returns:
        Shape [N, H, L, D].
    """
    blocks = Blocks(query.shape[2], window, causal)
    out = F.scaled_dot_product_attention(
        blocks.of_queries(query),
        blocks.of_keys(key),
        blocks.of_keys(value),
        attn_mask=blocks.mask(query),
    )
    return blocks.whole(out, query.shape[:2])


@dataclass(frozen=True)
class Blocks:
    """The blocks that samples are split into; short samples form a single block."""

    length: int
    window: int
    causal: bool

    @property
    def is_one(self) -> bool:
        """Whether samples stay whole."""
        return self.length <= _FULL_UP_TO * self.window

    @property
    def count(self) -> int:
        """Number of blocks per sample, C."""
        # A block has as many queries as the window has tokens: B = W.
        return -(-self.length // self.window)

    def of_queries(self, tokens: Tensor) -> Tensor:
        """Map shape [N, H, L, ...] to [N H, C, B, ...], padded with zeros."""
        if self.is_one:
            return tokens
        padded = F.pad(tokens, (*_no_padding(tokens), 0, self._missing))
        samples, heads = tokens.shape[:2]
        shape = (samples * heads, self.count, self.window, *tokens.shape[3:])
        return padded.reshape(shape)

    def of_keys(self, tokens: Tensor) -> Tensor:
        """Map shape [N, H, L, D] to [N H, C, S, D], a view with overlapping blocks."""
        if self.is_one:
            return tokens
        sides = (self.window, self.window + self._missing)
        padded = F.pad(tokens, (0, 0, *sides)).flatten(0, 1)
        return padded.unfold(1, 3 * self.window, self.window).transpose(2, 3)

    def whole(self, blocks: Tensor, samples: torch.Size) -> Tensor:
        """Invert `of_queries`, for samples and heads [N, H]."""
        if self.is_one:
            return blocks
        tokens = blocks.flatten(1, 2)[:, : self.length]
        return tokens.reshape(*samples, *tokens.shape[1:])

    def added_up(self, blocks: Tensor, samples: torch.Size) -> Tensor:
        """Map shape [N H, C, S, D] to [N, H, L, D]: sum every key over the blocks that contain
        it."""
        if self.is_one:
            return blocks
        # Each block's keys span three windows: neighbouring blocks overlap in two of them.
        places = blocks.new_zeros(blocks.shape[0], self.count + 2, self.window, blocks.shape[-1])
        for number, part in enumerate(blocks.chunk(3, dim=2)):
            places[:, number : number + self.count] += part
        tokens = places.flatten(1, 2)[:, self.window :][:, : self.length]
        return tokens.reshape(*samples, *tokens.shape[1:])

    def mask(self, like: Tensor) -> Tensor:
        """Return the mask added to the scores, 0 or -inf: shape [L, L] or [C, B, S]."""
        width = self.length if self.is_one else self.window
        first = 0 if self.is_one else -self.window
        span = self.length if self.is_one else 3 * self.window
        rows = torch.arange(width, device=like.device)[:, None]
        columns = torch.arange(first, first + span, device=like.device)
        near = (rows - columns).abs() <= self.window
        if self.causal:
            near = near & (columns <= rows)
        if not self.is_one:
            starts = torch.arange(self.count, device=like.device)[:, None, None] * self.window
            keys = starts + columns
            near = near & (keys >= 0) & (keys < self.length)
        return like.new_zeros(near.shape).masked_fill_(~near, -torch.inf)

    @property
    def _missing(self) -> int:
        return self.count * self.window - self.length


def _no_padding(tokens: Tensor) -> tuple[int, ...]:
    """Return zero padding for every dimension after the tokens."""
    return (0, 0) * (tokens.ndim - 3)


# Called directly: these kernels return the log-sum-exps that the backward pass needs.
_CPU = torch.ops.aten


def attend_by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Call dense attention once per run of neighbouring segments of equal length.

    Rows are sorted by length, so runs are long.

    Args:
        query: shape [T, H, D].
        key: shape [T, K, D].
        value: shape [T, K, D].
        lengths: lengths of the G segments.
        causal: whether a token attends only to itself and to earlier tokens.
        window: maximum distance of attended tokens, to each side unless causal; None: no limit.
            Requires K = H.

    Returns:
        Shape [T, H, D].
    """
    # Padding segments of nearly equal length into one call is slower: on a CPU, one call per run
    # was 4.7 times as fast as padded rows.
    grouped = query.shape[1] != key.shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if window is None or sees_all(q.shape[2], window):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return attend_within(q, k, v, window, causal=causal)

    return _concatenate_runs([attend(*run) for run in _split_runs(lengths, query, key, value)])


# Without a custom operator the graph would break here, or be recompiled for every list of lengths.
@torch.library.custom_op("elastrata::attention_by_runs", mutates_args=(), device_types="cpu")
def attend_by_runs_compiled(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Call `attend_by_runs` as a single node of a compiled graph, on a CPU.

    Key and value have as many heads as query.

    Returns:
        The result, shape [T, H, D], and log-sum-exps for the backward pass, shape [T, H].
    """
    results = [
        _forward(*qkv, causal=causal, window=window)
        for qkv in _split_runs(offsets.diff().tolist(), query, key, value)
    ]
    return _concatenate_runs([out for out, _ in results]), _concatenate_runs(
        [sums for _, sums in results]
    )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the attention of one run, and the log-sum-exps of its scores."""
    kernel = _CPU._scaled_dot_product_flash_attention_for_cpu
    if window is None or sees_all(query.shape[2], window):
        out, sums = kernel(query, key, value, is_causal=causal)
        return out, sums
    blocks, samples = Blocks(query.shape[2], window, causal), query.shape[:2]
    parts = (blocks.of_queries(query), blocks.of_keys(key), blocks.of_keys(value))
    out, sums = kernel(*parts, attn_mask=_as_four_dims(blocks.mask(query)))
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
    gradients = [
        _gradients(*run, causal=causal, window=window)
        for run in _split_runs(offsets.diff().tolist(), gradient, query, key, value, out, sums)
    ]
    of_query, of_key, of_value = (
        _concatenate_runs(list(parts)) for parts in zip(*gradients, strict=True)
    )
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
    """Return the gradients of query, key and value of one run."""
    kernel = _CPU._scaled_dot_product_flash_attention_for_cpu_backward
    if window is None or sees_all(query.shape[2], window):
        of_query, of_key, of_value = kernel(gradient, query, key, value, out, sums, 0.0, causal)
        return of_query, of_key, of_value
    blocks, samples = Blocks(query.shape[2], window, causal), query.shape[:2]
    of_query, of_key, of_value = kernel(
        blocks.of_queries(gradient),
        blocks.of_queries(query),
        blocks.of_keys(key),
        blocks.of_keys(value),
        blocks.of_queries(out),
        blocks.of_queries(sums),
        0.0,
        False,
        attn_mask=_as_four_dims(blocks.mask(query)),
    )
    query_gradient = blocks.whole(of_query, samples)
    return query_gradient, blocks.added_up(of_key, samples), blocks.added_up(of_value, samples)


def _as_four_dims(mask: Tensor) -> Tensor:
    """Return the mask with four dimensions, as the kernel requires."""
    return mask[(None,) * (4 - mask.ndim)]


def _split_runs(lengths: Sequence[int], *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield each tensor's part of every run of N segments of L tokens.

    Tensors have shape [T, H, ...], parts [N, H, L, ...].
    """
    runs = [(len(list(run)), length) for length, run in groupby(lengths)]
    sizes = [count * length for count, length in runs]
    for run, *parts in zip(runs, *(torch.split(x, sizes) for x in tensors), strict=True):
        yield [part.unflatten(0, run).transpose(1, 2) for part in parts]


def _concatenate_runs(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts of one tensor: the inverse of `_runs`."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])


@attend_by_runs_compiled.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


@_compiled_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, offsets, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*qkv, *output, offsets)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor | None, ...]:
    gradients = _compiled_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.window)
    return *gradients, None, None, None


attend_by_runs_compiled.register_autograd(_backward, setup_context=_save_for_backward)
