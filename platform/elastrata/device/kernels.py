"""PyTorch's semi-structured (2:4) kernels in the forward pass of linear layers.

The backward pass is dense. The gradient of the input needs the transposed weight, whose zeros are
not two of every four neighbours. The gradient of the weight multiplies no zeros.
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
"""Rows and columns must be a multiple of it, as all kernels for 16-bit numbers require."""
_AMPERE = (8, 0)
_TRIAL_SIZE = 256
"""Rows, columns and tokens of the trial product."""
_RELATIVE_TOLERANCE = 0.02
"""Tolerance relative to the largest value: the kernels sum bf16 products in another order."""


class SemiStructured(torch.autograd.Function):
    """`F.linear` for inputs of one or more dims, with a compressed weight in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compress: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Multiply by the compressed weight."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        # The plain weight: the backward pass is dense.
        ctx.save_for_backward(flat, weight)
        ctx.shape = inputs.shape
        return F.linear(flat, compress(weight), bias).reshape(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of inputs, weight and bias."""
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        bias_gradient = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return (gradient @ weight).reshape(ctx.shape), gradient.T @ inputs, bias_gradient, None


def compress_weight(weight: Tensor) -> Tensor:
    """Return a weight in the format of the kernels.

    At most two of every four neighbours in a row may differ from zero.
    """
    packed: Tensor = to_sparse_semi_structured(weight)
    return packed


def use_kernels(
    model: nn.Module,
    matrices: Mapping[str, Tensor],
    is_in_fours: Callable[[str], bool],
    compress: Callable[[Tensor], Tensor] = compress_weight,
) -> None:
    """Make linear layers multiply these weights by the kernels.

    Args:
        model: plain, or sharded by FSDP2.
        matrices: matrices of the model by parameter name.
        is_in_fours: returns whether a weight currently has two zeros of every four neighbours.
        compress: converts a weight to the format of the kernels.
    """
    names = {id(matrix): name for name, matrix in matrices.items()}
    # The compiler cannot trace these kernels. Not a decorator: `torch.compiler.disable` imports
    # the compiler, which takes seconds.
    multiply = torch.compiler.disable(partial(_multiply, compress))  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in names:
            is_active = partial(is_in_fours, names[id(module.weight)])
            # Not another module, so that parameter names and FSDP2's hooks do not change.
            module.forward = partial(_forward, module, is_active, multiply)  # type: ignore[method-assign]


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels exist and compute correct results; tried once per process."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _AMPERE:
        return False
    tensor_options: Any = {"device": device, "dtype": torch.bfloat16}
    generator = torch.Generator(device).manual_seed(0)
    weight, inputs = (
        torch.randn(_TRIAL_SIZE, _TRIAL_SIZE, generator=generator, **tensor_options)
        for _ in range(2)
    )
    # Two zeros of every four neighbours.
    weight[:, 0::4] = weight[:, 3::4] = 0
    try:
        product = F.linear(inputs, compress_weight(weight))
    # Builds of PyTorch without the library fail in different ways.
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    expected = F.linear(inputs.float(), weight.float())
    return bool(
        (product.float() - expected).abs().max() <= _RELATIVE_TOLERANCE * expected.abs().max()
    )


def _forward(
    module: nn.Linear,
    is_in_fours: Callable[[], bool],
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    inputs: Tensor,
) -> Tensor:
    if is_in_fours():
        return multiply(inputs, module.weight, module.bias)
    return F.linear(inputs, module.weight, module.bias)


def _multiply(
    compress: Callable[[Tensor], Tensor], inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    out: Tensor = SemiStructured.apply(inputs, weight, bias, compress)  # type: ignore[no-untyped-call]
    return out
