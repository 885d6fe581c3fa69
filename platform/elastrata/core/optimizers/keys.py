"""The keys that every optimizer has, and the two questions the engine asks it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from elastrata.config import Config
from elastrata.core.optimizers.groups import ParameterGroup

Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e38)]
NotNegative = Annotated[float, Field(ge=0, le=1e6)]


class OptimizerKeys(Config):
    """An optimizer that keeps Adam's running means for at least some of the parameters."""

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
