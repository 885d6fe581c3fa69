"""Muon (Keller Jordan, kellerjordan.github.io/posts/muon): orthogonal updates for the matrices of
the blocks, AdamW for everything else.

`torch.optim.Muon` is not used: it multiplies a sharded matrix with itself, which costs collectives
for every matrix and product, and computes in bfloat16 alone, so that runs at two sizes would part.
The updates are the same up to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, overload

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from elastrata.core.optimizers.adam_moments import adam_directions
from elastrata.core.optimizers.keys import (
    OptimizerKeys,
    ParameterGroup,
    block_matrices,
    decaying_or_not,
    trainable,
)
from elastrata.core.optimizers.whole_matrices import on_whole_matrices
from elastrata.core.parallelize import DTYPES, Precision
from elastrata.core.sharding import local

_RULE = "Muon"
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Keller Jordan's quintic (kellerjordan.github.io/posts/muon): steep at 0, never settling at 1."""
_STEPS = 5
_EPS = 1e-7


class MuonConfig(OptimizerKeys):
    """Muon for the matrices of the blocks; AdamW, with `betas` and `eps`, for the rest.

    One `lr` and `weight_decay` for both: a matrix of m rows and n columns moves by 0.2 *
    sqrt(max(m, n)) * lr, which makes its elements move as far as AdamW's do (Liu et al., arXiv
    2502.16982, equation 4).
    """

    has_second_moments: ClassVar[bool] = False

    name: Literal["muon"]
    """This optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the running mean of a matrix's gradient, per step."""
    nesterov: bool = True
    """Whether the update looks one step of the running mean ahead."""
    newton_schulz: Precision = "fp32"
    """Precision of the orthogonalisation. bf16, as published, is faster on GPUs; runs at different
    numbers of workers then agree in fewer digits."""

    def groups(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[ParameterGroup]:
        """The blocks' matrices; other weights, such as embeddings and head; biases and norms."""
        parameters = trainable(model)
        matrices = block_matrices(parameters, blocks)
        rest = {name: p for name, p in parameters.items() if name not in matrices}
        return [
            ParameterGroup(
                name="matrices of the blocks",
                rule=_RULE,
                weight_decay=self.weight_decay,
                parameters=matrices,
            ),
            *decaying_or_not(rest, "AdamW", self.weight_decay),
        ]

    def build(self, groups: Sequence[ParameterGroup]) -> Muon:
        """Muon, with AdamW for the groups that have its rule."""
        return Muon(
            [
                {
                    "params": list(group.parameters.values()),
                    "weight_decay": group.weight_decay,
                    "orthogonal": group.rule == _RULE,
                }
                for group in groups
            ],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            momentum=self.momentum,
            nesterov=self.nesterov,
            dtype=DTYPES[self.newton_schulz],
        )


class Muon(Optimizer):
    """Muon on plain or sharded parameters, equal at any number of ranks but for rounding."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        dtype: torch.dtype,
    ) -> None:
        """Groups: dicts with `params`, `weight_decay` and `orthogonal`, which the others lack."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._momentum, self._nesterov = momentum, nesterov
        self._orthogonalized = partial(orthogonalized, dtype=dtype)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates the parameters that have gradients.

        Collective over the ranks that shard them: two all-to-alls for all matrices, along each
        axis of the mesh.
        """
        if closure is not None:
            raise TypeError("Muon takes no closure")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["orthogonal"]:
                updates = self._matrix_updates(parameters)
            else:
                updates = adam_directions(self, parameters, betas=group["betas"], eps=group["eps"])
            weights = [local(parameter) for parameter in parameters]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
        return None

    def _matrix_updates(self, parameters: list[Tensor]) -> list[Tensor]:
        """This rank's parts of the orthogonal updates, scaled to the length of AdamW's."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        means = [local(self._mean(parameter)) for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1 - self._momentum)
        updates = torch._foreach_lerp(gradients, means, self._momentum) if self._nesterov else means
        whole = on_whole_matrices(parameters, updates, self._orthogonalized)
        torch._foreach_mul_(whole, [0.2 * math.sqrt(max(p.shape)) for p in parameters])
        return whole

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean: Tensor = state["momentum_buffer"]
        return mean


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Five steps of the quintic X -> a X + b (X X^T) X + c (X X^T)^2 X.

    Args:
        matrix: shape [m, n]. All zeros stay so.
        dtype: in which it is computed.

    Returns:
        Shape [m, n], of the dtype of `matrix`; singular values of some 0.7 to 1.2, but for those
        that were tiny beside the largest.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x.to(dtype)
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
