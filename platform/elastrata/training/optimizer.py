"""Optimizers by name, over parameters that decay and parameters that do not."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from elastrata.recipe.config import Config

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square, per step."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Share of lr * weight taken off each step; not from biases and norms."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: weights of two and more dims decay; biases and norms (one dim) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over `model`'s parameters as they are now, sharded or not; fused kernels."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
