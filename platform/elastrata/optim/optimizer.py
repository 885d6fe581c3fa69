"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from torch import nn
from torch.optim import Optimizer

from elastrata.optim.adamw import AdamWConfig
from elastrata.optim.base import OptimizerKeys
from elastrata.optim.lamb import LambConfig
from elastrata.optim.muon import MuonConfig


def _named(value: Any) -> Any:
    return {"name": "adamw", **value} if isinstance(value, dict) else value


OptimizerConfig = Annotated[
    AdamWConfig | LambConfig | MuonConfig, Field(discriminator="name"), BeforeValidator(_named)
]
"""One of the optimizers; AdamW where there is no name."""


def build_optimizer(
    config: OptimizerKeys, model: nn.Module, blocks: Sequence[nn.Module]
) -> Optimizer:
    """The optimizer over `model`'s parameters as they are now, sharded or not."""
    groups = config.groups(model, blocks)
    return config.build([group for group in groups if group.parameters])


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
