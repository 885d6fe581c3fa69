"""The choice among optimizers by name."""

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


def _add_name(value: Any) -> Any:
    # The discriminated union needs a name before it validates.
    return {"name": "adamw", **value} if isinstance(value, dict) else value


OptimizerConfig = Annotated[
    AdamWConfig | LambConfig | MuonConfig,
    Field(discriminator="name"),
    BeforeValidator(_add_name),
]
"""One of the optimizers; AdamW without a name."""


def build_optimizer(
    config: OptimizerKeys, model: nn.Module, blocks: Sequence[nn.Module]
) -> Optimizer:
    """Build the optimizer over `model`'s parameters in their current sharding."""
    groups = config.groups(model, blocks)
    return config.build([group for group in groups if group.parameters])


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
