"""The kernel of attention: which ones a recipe may ask for, and where there is which."""

from __future__ import annotations

from typing import Literal

import torch

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
