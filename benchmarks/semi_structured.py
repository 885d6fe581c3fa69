"""GPT whose sparse layers are multiplied by PyTorch's semi-structured (2:4) kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from elastrata_pipelines.format import Vocabulary
from elastrata_workloads.gpt.model import GptModel
from elastrata_workloads.gpt.workload import Gpt


class SemiStructuredGpt(Gpt):
    """Its matrices must have at most two weights of every four neighbours that are not zero."""

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> GptModel:
        model = super().build_model(vocabulary, seq_len)
        for block in model.blocks:
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    module.forward = partial(_forward, module)  # type: ignore[method-assign]
        return model


class SemiStructured(torch.autograd.Function):
    """A linear layer whose forward pass compresses its weight and multiplies that.

    The gradient of the input needs the weight transposed, in which the zeros are not two of every
    four neighbours, and that of the weight multiplies nothing with zeros: both are dense.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs, compressed(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight, gradient.T @ inputs, of_bias


def compressed(weight: Tensor) -> Tensor:
    """What the kernels multiply; the weight itself on a CPU, which has none."""
    if weight.device.type == "cpu":
        return weight
    found: SparseSemiStructuredTensor = to_sparse_semi_structured(weight)
    return found


@torch.compiler.disable
def _forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    out: Tensor = SemiStructured.apply(inputs, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return out
