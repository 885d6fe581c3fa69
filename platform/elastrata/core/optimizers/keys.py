"""The keys that every optimizer has, the two questions the engine asks it, and the groups of
parameters that it treats alike."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from elastrata.config import Config

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
