"""Sizes and options of a norm, a self-attention and a block, and the attention kernels.

This module does not import torch's compiler, so that drivers can read these shapes quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from elastrata.config import Config
from elastrata.device.capabilities import DeviceCapabilities

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "geglu", "swiglu"]
Kernel = Literal["auto", "varlen", "dense"]

# torch's varlen attention is flash attention, which needs Ampere or newer and half precision.
_LEAST_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16)
# Other head sizes raise at the first step.
_HEAD_MULTIPLE, _LARGEST_HEAD = 8, 256


def is_gated(activation: Activation) -> bool:
    """Return whether the feed-forward has a gate, a third matrix."""
    return activation.endswith("glu")


def has_varlen(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int = _HEAD_MULTIPLE
) -> bool:
    """Return whether flash attention supports this dtype and head size on a device of this
    capability."""
    is_size = head_size % _HEAD_MULTIPLE == 0 and head_size <= _LARGEST_HEAD
    is_device = capability is not None and capability >= _LEAST_CAPABILITY
    return is_device and is_size and dtype in _DTYPES


def interrupts_graphs(
    kernel: Kernel, capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int
) -> bool:
    """Return whether attention breaks compiled graphs, as dense attention on GPUs does."""
    is_dense = kernel == "dense" or not has_varlen(capability, dtype, head_size)
    return capability is not None and is_dense


def shares_heads(varlen_attn: Callable[..., object]) -> bool:
    """Return whether torch's varlen attention supports fewer key and value heads (torch >=
    2.12)."""
    return "enable_gqa" in signature(varlen_attn).parameters


def kernel_substitutions(
    kernel: Kernel, capabilities: DeviceCapabilities, dtype: torch.dtype, head_size: int
) -> list[str]:
    """Return one line if `workload.attention` requests a kernel that is unavailable, or if the head
    size alone prevents the fast one."""
    capability = capabilities.capability
    if kernel == "dense" or has_varlen(capability, dtype, head_size):
        return []
    if has_varlen(capability, dtype):
        where = (
            f"heads of {head_size}, only for multiples of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
        )
    elif kernel == "auto":
        return []
    else:
        where = "fp32" if has_varlen(capability, torch.bfloat16) else capabilities.device
    return [
        f"workload.attention: {kernel}: unavailable for {where}; using dense instead, one call per "
        "run of samples of equal length"
    ]


Norm = Literal["layer", "rms"]


@dataclass(frozen=True, kw_only=True)
class NormShape:
    """LayerNorm, or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), which has no bias."""

    kind: Norm = "layer"
    eps: float
    """Added to the variance, or mean square, before the square root."""
    bias: bool = True
    """Whether a LayerNorm has a bias."""

    def over(self, size: int) -> nn.LayerNorm | nn.RMSNorm:
        """Return a norm module over `size` features."""
        if self.kind == "rms":
            return nn.RMSNorm(size, eps=self.eps)
        return nn.LayerNorm(size, eps=self.eps, bias=self.bias)

    def numbers(self, size: int) -> int:
        """Return the number of parameters of a norm over `size` features."""
        return size * (2 if self.kind == "layer" and self.bias else 1)


Factor = Annotated[float, Field(gt=0, le=1e6)]


class RotaryScaling(Config):
    """Slower rotation of the slow pairs of features, for longer samples than a model began with, as
    in Llama 3.1 (Dubey et al. 2024, arXiv 2407.21783)."""

    factor: Factor
    """Number by which the frequencies of the slowest pairs are divided."""
    low_freq_factor: Factor = 1.0
    """Rotations within `original_max_positions` up to which a pair is slowed by `factor`."""
    high_freq_factor: Factor = 4.0
    """Rotations within `original_max_positions` from which a pair is left alone; above
    `low_freq_factor`."""
    original_max_positions: Annotated[int, Field(gt=0, le=2**24)]
    """Longest sample before, in tokens."""

    @model_validator(mode="after")
    def _factors_ascend(self) -> RotaryScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor:g}) must be above low_freq_factor "
                f"({self.low_freq_factor:g})"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes and options of a self-attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Number of key and value heads, a divisor of `num_heads`."""
    own_head_size: int | None = None
    """Width of a head; None: `hidden_size` / `num_heads`."""
    bias: bool
    """Whether the projections to query, key and value have a bias."""
    output_bias: bool
    """Whether the output's projection has a bias."""
    causal: bool
    """Whether a token attends only to itself and to earlier tokens."""
    window: int | None = None
    """Maximum distance of attended tokens, to each side; None: the whole segment."""
    rotary_base: float | None = None
    """Base of the rotary angles; None: no rotary positions."""
    rotary_scaling: RotaryScaling | None = None
    head_norm: NormShape | None = None
    """Norm of every head's query and key; None: no norm."""
    kernel: Kernel

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.own_head_size or self.hidden_size // self.num_heads

    @property
    def width(self) -> int:
        """Width of the query, and of attention's result."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Width of the key, and of the value."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes and options of a transformer block."""

    attention: AttentionShape
    intermediate_size: int
    activation: Activation
    bias: bool
    """Whether the feed-forward's matrices have a bias."""
    norm: NormShape
    normed_input: bool = True
    """Whether attention has a norm before it; False if the embeddings end with a norm."""
    attention_dropout: float
    """Dropout rate of attention's output."""
    feed_forward_dropout: float

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has three matrices."""
        return is_gated(self.activation)

    @property
    def vectors(self) -> int:
        """Number of parameters in biases and norms, with one norm before each half."""
        shape, hidden = self.attention, self.attention.hidden_size
        of_heads = 2 * shape.head_norm.numbers(shape.head_size) if shape.head_norm else 0
        of_attention = shape.width + 2 * shape.kv_width if shape.bias else 0
        of_attention += hidden if shape.output_bias else 0
        inner = (2 if self.gated else 1) * self.intermediate_size
        of_feed_forward = hidden + inner if self.bias else 0
        return of_heads + of_attention + of_feed_forward + 2 * self.norm.numbers(hidden)
