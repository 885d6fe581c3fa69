"""The plan of a phase's sparsity: how many weights of which layer are zero, and what that saves.
Names and numbers in, numbers out.

A weight is multiplied once per token in the forward pass and twice in the backward pass, for the
gradient of the input and for its own; a multiplication with its addition counts as two. With a
weight at zero none of the three is needed: 6 FLOPs per zero and token. An update of RigL needs the
gradients of all weights, so in its step only two of the three can be left out: 4 FLOPs. What is not
the matrix of a sparse layer (embeddings, head, attention's own products) costs what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastrata.core.sparsity.config import (
    AnySparsity,
    BlockConfig,
    GivenConfig,
    RiglConfig,
    TwoFourConfig,
)
from elastrata.core.sparsity.layers import Shapes, layer_levels
from elastrata.core.sparsity.mask_file import read_masks
from elastrata.core.sparsity.rigl import drop_fraction
from elastrata_pipelines.deal import WorkModel

_ALL, _WITHOUT_GRADIENT = 6, 4
_FORWARD_AND_BACKWARD = 3
"""Times the FLOPs of the forward pass."""


def flops_of_zeros(zeros: int, tokens: int, *, dense_gradient: bool = False) -> int:
    """The FLOPs of forward and backward that a device which skips zeros saves.

    Args:
        zeros: weights held at zero, each applied once to every token.
        tokens: of the global batch.
        dense_gradient: whether the gradients of all weights are needed.
    """
    return (_WITHOUT_GRADIENT if dense_gradient else _ALL) * zeros * tokens


@dataclass(frozen=True, kw_only=True)
class SparsityPlan:
    """A phase's sparsity, layer by layer."""

    method: str
    """`dense` where it holds nothing."""
    shapes: Shapes
    """Rows and columns of the sparse layers."""
    zeros: Mapping[str, int]
    """Weights at zero, by layer."""
    seq_len: int
    """FLOPs are those of a sample of so many tokens, forward and backward."""
    flops_dense: int
    """By the workload's formula, without zeros."""
    flops: float
    """Without products with zeros; where gradients of all weights are needed now and then, the mean
    over the phase."""

    @property
    def level(self) -> float:
        """Share of the sparse layers' weights that is zero."""
        weights = sum(rows * columns for rows, columns in self.shapes.values())
        return sum(self.zeros.values()) / weights if weights else 0.0

    @property
    def times_fewer(self) -> float:
        """How many times fewer FLOPs than dense."""
        return self.flops_dense / self.flops


def sparsity_plan(
    config: AnySparsity | None, shapes: Shapes, *, work: WorkModel, seq_len: int, steps: int
) -> SparsityPlan:
    """The plan of a phase.

    Args:
        config: the phase's; None: dense.
        shapes: of all layers that may be sparse.
        work: FLOPs of the forward pass for a sample by its length.
        seq_len: tokens of the sample whose FLOPs are counted.
        steps: of the phase.

    Raises:
        UserError: a file of masks is missing or that of another model.
    """
    zeros = planned_zeros(config, shapes) if config else {}
    dense = _FORWARD_AND_BACKWARD * int(work(seq_len))
    number = sum(zeros.values())
    updates = _updates(config, steps) / steps
    saved = flops_of_zeros(number, seq_len) * (1 - updates)
    saved += flops_of_zeros(number, seq_len, dense_gradient=True) * updates
    return SparsityPlan(
        method=config.method if config else "dense",
        shapes={name: shapes[name] for name in zeros},
        zeros=zeros,
        seq_len=seq_len,
        flops_dense=dense,
        flops=dense - saved,
    )


def planned_zeros(config: AnySparsity, shapes: Shapes) -> dict[str, int]:
    """Weights that are held at zero, by layer."""
    levels = layer_levels(config, shapes)
    if isinstance(config, GivenConfig):
        masks = read_masks(config.masks, shapes)
        return {name: int(masks[name].sum()) if name in masks else 0 for name in levels}
    zeros = {}
    for name, level in levels.items():
        weights = shapes[name][0] * shapes[name][1]
        if isinstance(config, TwoFourConfig):
            zeros[name] = weights // 2
        elif isinstance(config, BlockConfig):
            zeros[name] = round(level * (weights // config.block**2)) * config.block**2
        else:
            zeros[name] = round(level * weights)
    return zeros


def _updates(config: AnySparsity | None, steps: int) -> int:
    """Steps of a phase that need the gradients of all weights."""
    if not isinstance(config, RiglConfig):
        return 0
    every = config.schedule.every
    return sum(drop_fraction(config, step, steps) > 0 for step in range(every, steps + 1, every))
