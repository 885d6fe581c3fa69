"""Adam's running means, on the shards that this rank has: they need no other rank's."""

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
    """Parameters with one rule and one weight decay."""

    name: str
    rule: str
    """How they are updated: `AdamW`, `LAMB`..."""
    weight_decay: float
    parameters: Named
    """By their names in the model."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all the tensors."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def patterns(self) -> dict[str, int]:
        """The names with `*` for the numbers in them, and the shapes, each with how many it
        stands for."""
        return dict(
            Counter(
                f"{re.sub(r'[.][0-9]+(?=[.]|$)', '.*', name)} {list(parameter.shape)}"
                for name, parameter in self.parameters.items()
            )
        )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, tied ones once, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def block_matrices(parameters: Named, blocks: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that are matrices of these blocks."""
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    return {name: p for name, p in parameters.items() if id(p) in inside}


def decaying_or_not(parameters: Named, rule: str, weight_decay: float) -> list[ParameterGroup]:
    """Two groups: weights of two and more dims decay; biases and norms (one dim) do not."""
    weights = {name: p for name, p in parameters.items() if p.ndim >= 2}
    rest = {name: p for name, p in parameters.items() if p.ndim < 2}
    return [
        ParameterGroup(name="weights", rule=rule, weight_decay=weight_decay, parameters=weights),
        ParameterGroup(name="biases and norms", rule=rule, weight_decay=0.0, parameters=rest),
    ]


class OptimizerKeys(Config):
    """An optimizer that keeps Adam's running means for at least some of the parameters."""

    has_second_moments: ClassVar[bool] = True
    """Whether every parameter has a running mean of its squared gradient."""

    name: str
    """Which optimizer; each has further keys of its own."""
    lr: Positive
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square, per step."""
    eps: Positive = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.01
    """Share of lr * weight taken off each step; not from biases and norms."""

    @abstractmethod
    def groups(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[ParameterGroup]:
        """All trainable parameters of `model`, each in one group; `blocks` are its repeated
        blocks. Sharded or not, or on the meta device."""

    @abstractmethod
    def build(self, groups: Sequence[ParameterGroup]) -> Optimizer:
        """The optimizer over the parameters of `groups` as they are now, sharded or not."""


def adam_directions(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """One more step of the running means in the optimizer's state, and what they say.

    Args:
        optimizer: its state gets `step`, `exp_avg` and `exp_avg_sq`, as that of PyTorch's AdamW.
        parameters: with gradients; not changed.
        betas: decay of the means of the gradient and of its square.
        eps: added to the root of the second.

    Returns:
        Of each parameter's local shard the mean over the root of the mean square, both corrected
        for their start at zero (Kingma and Ba, arXiv 1412.6980, algorithm 1).
    """
    states = [_state(optimizer, parameter) for parameter in parameters]
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    means = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    for state in states:
        state["step"] += 1
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
        # A tensor in main memory: checkpoints are tensors alone, and reading it waits for no GPU.
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state
