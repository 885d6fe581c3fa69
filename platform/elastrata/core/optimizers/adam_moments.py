"""Adam's running means, on the shards that this rank has: they need no other rank's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastrata.core.sharding import local


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
