"""PyTorch's semi-structured (2:4) kernels in a linear layer's forward pass.

The gradient of the input needs the weight transposed, in which the zeros are not two of every four
neighbours, and that of the weight multiplies nothing with zeros: both stay dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

MULTIPLE = 64
"""Rows and columns are a multiple of it, as all kernels of 16-bit numbers need."""
_AMPERE = (8, 0)
_TRIED = 256
"""Rows, columns and tokens of the product that is tried."""
_RELATIVE = 0.02
"""Allowed error relative to the largest value: sums of bf16 products in another order."""


class SemiStructured(torch.autograd.Function):
    """`F.linear` on inputs of one or more dimensions, whose forward pass multiplies what `compress`
    makes of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compress: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Multiplies by the compressed weight."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.shape = inputs.shape
        return F.linear(flat, compress(weight), bias).reshape(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Gradients of inputs, weight and bias."""
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return (gradient @ weight).reshape(ctx.shape), gradient.T @ inputs, of_bias, None


def compressed(weight: Tensor) -> Tensor:
    """A weight in the format of the kernels. At most two of every four neighbours in a row may be
    other than zero."""
    packed: Tensor = to_sparse_semi_structured(weight)
    return packed


def use_kernels(
    model: nn.Module,
    matrices: Mapping[str, Tensor],
    is_in_fours: Callable[[str], bool],
    compress: Callable[[Tensor], Tensor] = compressed,
) -> None:
    """From now on linear layers multiply these weights by the kernels.

    Args:
        model: plain, or sharded by FSDP2.
        matrices: of it, by parameter name.
        is_in_fours: whether a weight's zeros are two of every four neighbours at the moment.
        compress: what the kernels take of a weight.
    """
    names = {id(matrix): name for name, matrix in matrices.items()}
    # Not before here, as torch's compiler, which cannot look into them, takes seconds to import.
    multiplied = torch.compiler.disable(partial(_multiplied, compress))  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in names:
            now = partial(is_in_fours, names[id(module.weight)])
            module.forward = partial(_forward, module, now, multiplied)  # type: ignore[method-assign]


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels are there and multiply as they should: tried once in a process."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _AMPERE:
        return False
    like: Any = {"device": device, "dtype": torch.bfloat16}
    generator = torch.Generator(device).manual_seed(0)
    weight, inputs = (torch.randn(_TRIED, _TRIED, generator=generator, **like) for _ in range(2))
    weight[:, 0::4] = weight[:, 3::4] = 0
    try:
        product = F.linear(inputs, compressed(weight))
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    expected = F.linear(inputs.float(), weight.float())
    return bool((product.float() - expected).abs().max() <= _RELATIVE * expected.abs().max())


def _forward(
    module: nn.Linear,
    is_in_fours: Callable[[], bool],
    multiplied: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    inputs: Tensor,
) -> Tensor:
    if is_in_fours():
        return multiplied(inputs, module.weight, module.bias)
    return F.linear(inputs, module.weight, module.bias)


def _multiplied(
    compress: Callable[[Tensor], Tensor], inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    out: Tensor = SemiStructured.apply(inputs, weight, bias, compress)  # type: ignore[no-untyped-call]
    return out
