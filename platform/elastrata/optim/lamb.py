"""LAMB (You et al., arXiv 1904.00962, algorithm 2): Adam's direction, scaled to the weights'
norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, overload

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from elastrata.device.device_transfer import to_device
from elastrata.optim.base import (
    NotNegative,
    OptimizerKeys,
    ParameterGroup,
    adam_directions,
    split_by_decay,
    trainable,
)
from elastrata.parallel.sharding import MeshAxis, local, sharding_axes


class LambConfig(OptimizerKeys):
    """LAMB (You et al., arXiv 1904.00962), for large batches.

    Weights move by lr * trust * update. The trust ratio is the norm of the weights over the norm of
    the update, for each tensor. Biases and norms neither decay nor have a trust ratio, as in the
    published runs of BERT.
    """

    name: Literal["lamb"]
    """LAMB."""
    trust_min: NotNegative = 0.0
    """Lower limit of the trust ratio."""
    trust_max: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 10.0
    """Upper limit of the trust ratio; `.inf`: no limit."""

    @model_validator(mode="after")
    def _check_bounds(self) -> LambConfig:
        if self.trust_min > self.trust_max:
            raise ValueError(
                f"trust_min ({self.trust_min}) is larger than trust_max ({self.trust_max})"
            )
        return self

    def groups(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[ParameterGroup]:
        """Return two groups: weights, with decay and trust ratio, and biases and norms, without."""
        return split_by_decay(trainable(model), "LAMB", self.weight_decay)

    def build(self, groups: Sequence[ParameterGroup]) -> Lamb:
        """Build LAMB, with trust ratios for tensors of two and more dims."""
        return Lamb(
            [
                {
                    "params": list(group.parameters.values()),
                    "weight_decay": group.weight_decay,
                    "has_trust": all(p.ndim >= 2 for p in group.parameters.values()),
                }
                for group in groups
            ],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            trust=(self.trust_min, self.trust_max),
        )


class Lamb(Optimizer):
    """LAMB on plain or sharded parameters, equal up to rounding at any number of ranks.

    It is algorithm 2 of the paper, with bias-corrected moments and the decay inside of the update
    that the trust ratio scales. `trust` bounds the ratio. The ratio is 1 if weights or update are
    all zero.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        trust: tuple[float, float],
    ) -> None:
        """Initialise from groups: dicts with `params`, `weight_decay` and `has_trust`."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "trust": trust})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have gradients.

        Collective over the ranks that shard them: one reduction per group with trust ratios.
        """
        if closure is not None:
            raise TypeError("LAMB takes no closure")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(group, parameters)
        return None

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        weights = [local(parameter) for parameter in parameters]
        updates = adam_directions(self, parameters, betas=group["betas"], eps=group["eps"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["has_trust"]:
            ratios = trust_ratios(*_global_norms(parameters, weights, updates), *group["trust"])
            for update, ratio in zip(updates, ratios.to(updates[0].dtype), strict=True):
                update.mul_(ratio)
        torch._foreach_add_(weights, updates, alpha=-group["lr"])


def trust_ratios(weights: Tensor, updates: Tensor, smallest: float, largest: float) -> Tensor:
    """Return the trust ratios from the norms of weights and updates, all of shape [tensors]."""
    ratios = (weights / updates).clamp(smallest, largest)
    # Weights that start at zero would otherwise never move.
    return torch.where((weights > 0) & (updates > 0), ratios, 1.0)


def _global_norms(parameters: Sequence[Tensor], *shards: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of tensors that are sharded like `parameters`.

    Collective over the axes that shard them, with one all-reduce per axis for any number of
    tensors: one under FSDP, one inside of each replica under HSDP, and another one with tensor
    parallelism, of the tensors that it divides.

    Args:
        parameters: tensors with the same sharding; their values are not used.
        shards: one or more lists with this rank's shard of one tensor per parameter. Shards may be
            empty.

    Returns:
        Shape [number of lists, number of parameters], float64.
    """
    norms = [torch.stack(torch._foreach_norm(list(shard))) for shard in shards]
    squares = torch.stack(norms).double().square()
    columns: dict[MeshAxis, list[int]] = {}
    for number, parameter in enumerate(parameters):
        for axis in sharding_axes(parameter):
            columns.setdefault(axis, []).append(number)
    # Only the columns of the tensors that the axis divides: the others are complete on every rank.
    for axis, numbers in columns.items():
        # Indexing with a list would make the host wait for the device.
        places = to_device(torch.tensor(numbers), squares.device)
        sums = squares.index_select(1, places)
        dist.all_reduce(sums, group=axis.group)
        squares.index_copy_(1, places, sums)
    return squares.sqrt()
