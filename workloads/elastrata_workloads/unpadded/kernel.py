"""The kernel of attention: which ones a recipe may ask for, and where there is which."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Literal

import torch

from elastrata.core.device import DeviceCapabilities

Kernel = Literal["auto", "varlen", "dense"]

_LEAST_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16)


def has_varlen(capability: tuple[int, int] | None, dtype: torch.dtype) -> bool:
    """Whether flash attention takes tensors of that type on such a device.

    Args:
        capability: compute capability of the GPU; None: no GPU.
        dtype: of query, key and value.
    """
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
    """A line where a recipe's `workload.attention` asks for a kernel that is not there.

    Args:
        kernel: that it asks for.
        capabilities: of the machine.
        dtype: of query, key and value.
    """
    if kernel != "varlen" or has_varlen(capabilities.capability, dtype):
        return []
    lacks = has_varlen(capabilities.capability, torch.bfloat16)
    where = "fp32" if lacks else capabilities.device
    return [
        f"workload.attention: varlen: there is none for {where}; dense instead, one call per "
        "run of samples of equal length"
    ]
