"""What optimizers share: parameter groups, common keys, and Adam's running means of local
shards."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from elastrata.config import Config
from elastrata.parallel.sharding import local

Named = Mapping[str, nn.Parameter]
Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e38)]
NotNegative = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same update rule and weight decay."""

    name: str
    rule: str
    """Update rule, such as `AdamW` or `LAMB`."""
    weight_decay: float
    parameters: Named
    """Parameters by their names in the model."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def patterns(self) -> dict[str, int]:
        """Return the parameters' names with `*` for numbers, with their shapes, and the count of
        each."""
        return dict(
            Counter(
                f"{re.sub(r'[.][0-9]+(?=[.]|$)', '.*', name)} {list(parameter.shape)}"
                for name, parameter in self.parameters.items()
            )
        )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters in the model's order; tied ones appear once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def block_matrices(parameters: Named, blocks: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Return those of the parameters that are matrices of the blocks."""
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    return {name: p for name, p in parameters.items() if id(p) in inside}


def split_by_decay(parameters: Named, rule: str, weight_decay: float) -> list[ParameterGroup]:
    """Return two groups: weights of two and more dims, and biases and norms, which do not decay."""
    weights = {name: p for name, p in parameters.items() if p.ndim >= 2}
    rest = {name: p for name, p in parameters.items() if p.ndim < 2}
    return [
        ParameterGroup(name="weights", rule=rule, weight_decay=weight_decay, parameters=weights),
        ParameterGroup(name="biases and norms", rule=rule, weight_decay=0.0, parameters=rest),
    ]


class OptimizerKeys(Config):
    """Keys of an optimizer that keeps Adam's running means for at least some of the parameters."""

    # The planner counts the optimizer's memory by it.
    has_second_moments: ClassVar[bool] = True
    """Whether every parameter has a running mean of its squared gradient."""

    name: str
    """Name of the optimizer; each has further keys."""
    lr: Positive
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay per step of the running means of the gradient and of its square."""
    eps: Positive = 1e-6
    """Number added to the root of the second moment."""
    weight_decay: NotNegative = 0.01
    """Share of lr * weight subtracted per step, except from biases and norms."""

    @abstractmethod
    def groups(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[ParameterGroup]:
        """Return all trainable parameters of `model`, each in one group.

        Args:
            model: sharded or not, or on the meta device.
            blocks: its repeated blocks.
        """

    @abstractmethod
    def build(self, groups: Sequence[ParameterGroup]) -> Optimizer:
        """Build the optimizer over the parameters of `groups` in their current sharding."""


def adam_directions(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """Update the running means in the optimizer's state and return Adam's update directions.

    No communication: a shard's means depend on its own gradients only.

    Args:
        optimizer: its state gets `step`, `exp_avg` and `exp_avg_sq`, like that of PyTorch's AdamW.
        parameters: parameters with gradients; not changed.
        betas: decay of the means of the gradient and of its square.
        eps: added to the root of the second mean.

    Returns:
        For each parameter's local shard, the mean over the root of the mean square, both corrected
            for their initialisation with zero (Kingma and Ba, arXiv 1412.6980, algorithm 1).
    """
    states = [_state(optimizer, parameter) for parameter in parameters]
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    means = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    for state in states:
        state["step"] += 1
    # They differ if some parameters had no gradient in some steps.
    steps = [int(state["step"]) for state in states]
    torch._foreach_lerp_(means, gradients, 1 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - betas[1])
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [math.sqrt(1 - betas[1] ** step) for step in steps])
    torch._foreach_add_(roots, eps)
    directions = torch._foreach_div(means, roots)
    torch._foreach_div_(directions, [1 - betas[0] ** step for step in steps])
    return list(directions)


def _state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        # A tensor, as checkpoints only store tensors; in main memory, so that reading it does not
        # wait for a GPU.
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state
