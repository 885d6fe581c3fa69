"""The numbers that fix a norm, a self-attention and a block, and the kernels of attention.

Imports nothing of torch's compiler, so that drivers can read these shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Literal

import torch
from torch import nn

from elastrata.device.capabilities import DeviceCapabilities

Activation = Literal["gelu", "gelu_tanh", "geglu", "swiglu"]
Kernel = Literal["auto", "varlen", "dense"]

_LEAST_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16)


def is_gated(activation: Activation) -> bool:
    """Whether the feed-forward has a third matrix, whose outputs the others are multiplied by."""
    return activation.endswith("glu")


def has_varlen(capability: tuple[int, int] | None, dtype: torch.dtype) -> bool:
    """Whether flash attention takes tensors of that type on such a device."""
    return capability is not None and capability >= _LEAST_CAPABILITY and dtype in _DTYPES


def interrupts_graphs(
    kernel: Kernel, capability: tuple[int, int] | None, dtype: torch.dtype
) -> bool:
    """Whether attention is no part of a compiled graph: the dense one of GPUs."""
    is_dense = kernel == "dense" or not has_varlen(capability, dtype)
    return capability is not None and is_dense


def shares_heads(varlen_attn: Callable[..., object]) -> bool:
    """Whether torch's varlen attention takes fewer heads of key and value than of query; before
    torch 2.12 it does not."""
    return "enable_gqa" in signature(varlen_attn).parameters


def substitution(kernel: Kernel, capabilities: DeviceCapabilities, dtype: torch.dtype) -> list[str]:
    """A line where a recipe's `workload.attention` asks for a kernel that is not there."""
    if kernel != "varlen" or has_varlen(capabilities.capability, dtype):
        return []
    lacks = has_varlen(capabilities.capability, torch.bfloat16)
    where = "fp32" if lacks else capabilities.device
    return [
        f"workload.attention: varlen: there is none for {where}; dense instead, one call per "
        "run of samples of equal length"
    ]


Norm = Literal["layer", "rms"]


@dataclass(frozen=True, kw_only=True)
class NormShape:
    """LayerNorm, or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), which has no bias."""

    kind: Norm = "layer"
    eps: float
    """Added to variances, or mean squares, before the square root."""
    bias: bool = True
    """Whether a LayerNorm has one."""

    def over(self, size: int) -> nn.LayerNorm | nn.RMSNorm:
        """A norm over so many features."""
        if self.kind == "rms":
            return nn.RMSNorm(size, eps=self.eps)
        return nn.LayerNorm(size, eps=self.eps, bias=self.bias)

    def numbers(self, size: int) -> int:
        """Parameters of a norm over so many features."""
        return size * (2 if self.kind == "layer" and self.bias else 1)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Everything that fixes a self-attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Heads of key and value, a divisor of `num_heads`."""
    bias: bool
    """Whether projections have one."""
    causal: bool
    """Whether a token attends to itself and those before it only."""
    window: int | None = None
    """Tokens to each side that a token attends to at most; None: all of its segment."""
    rotary_base: float | None = None
    """Of the angles that queries and keys are turned by; None: they are not."""
    head_norm: NormShape | None = None
    """Of every head's query and key; None: they have none."""
    kernel: Kernel

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of the key, and of the value."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Everything that fixes a block's parameters and how they are applied."""

    attention: AttentionShape
    intermediate_size: int
    activation: Activation
    bias: bool
    """Whether the feed-forward's matrices have one."""
    norm: NormShape
    normed_input: bool = True
    """Whether there is a norm before attention: not where the embeddings have just had one."""
    attention_dropout: float
    """Of attention's output."""
    feed_forward_dropout: float

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has three matrices."""
        return is_gated(self.activation)

    @property
    def vectors(self) -> int:
        """Numbers in biases and norms, with one before each half."""
        shape, hidden = self.attention, self.attention.hidden_size
        of_heads = 2 * shape.head_norm.numbers(shape.head_size) if shape.head_norm else 0
        of_attention = 2 * hidden + 2 * shape.kv_width if shape.bias else 0
        inner = (2 if self.gated else 1) * self.intermediate_size
        of_feed_forward = hidden + inner if self.bias else 0
        return of_heads + of_attention + of_feed_forward + 2 * self.norm.numbers(hidden)
