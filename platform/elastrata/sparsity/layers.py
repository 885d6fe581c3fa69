"""The layers of a workload that may be sparse, and the level of each.

A weight is multiplied once per token in the forward pass and twice in the backward pass, for the
gradient of the input and for its own. A multiplication with its addition counts as two FLOPs. A
weight at zero needs none of the three: 6 FLOPs per zero and token. An update of RigL needs the
gradients of all weights, so its step saves only two of the three: 4 FLOPs. Everything outside of
sparse layers (embeddings, head, products inside of attention) has its full cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from elastrata.device.kernels import MULTIPLE
from elastrata.optim.base import block_matrices
from elastrata.parallel.init_weights import meta_model
from elastrata.sparsity.config import (
    AnySparsity,
    BlockConfig,
    GivenConfig,
    LevelKeys,
    RiglConfig,
    TwoFourConfig,
)
from elastrata.sparsity.mask_file import read_masks
from elastrata.sparsity.rigl import drop_fraction
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.format import Vocabulary

if TYPE_CHECKING:
    from elastrata.workload.workload import Workload


WEIGHT = ".weight"
"""Suffix of the name of a layer's weight."""
Shapes = Mapping[str, tuple[int, int]]
"""Rows and columns by layer."""


def layer_shapes(workload: Workload) -> dict[str, tuple[int, int]]:
    """Return rows and columns of every matrix that may be sparse, by layer.

    It needs neither memory nor data.
    """
    # A minimal one: the blocks' matrices do not depend on it.
    vocabulary = Vocabulary(size=8, pad_id=0, mask_id=1, special_ids=(), continuation_ids=())
    model = meta_model(lambda: workload.build_model(vocabulary, seq_len=1))
    matrices = sparse_matrices(model, workload.blocks(model))
    return {layer_of(name): (m.shape[0], m.shape[1]) for name, m in matrices.items()}


def sparse_matrices(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that may be held at zero, by name: the matrices of the blocks.

    Each of them is applied once to every token.
    """
    return block_matrices(dict(model.named_parameters()), blocks)


def layer_of(parameter: str) -> str:
    """Return the name of the layer of a weight."""
    return parameter.removesuffix(WEIGHT)


def match_layers(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match any of the patterns, in their order."""
    pattern_list = list(patterns)
    # `fnmatch` ignores case on some systems.
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in pattern_list)]


def layer_levels(config: AnySparsity, shapes: Shapes) -> dict[str, float]:
    """Return the share of zeros by sparse layer; 0 if a file defines the zeros."""
    sparse = match_layers(shapes, config.layers)
    if isinstance(config, GivenConfig):
        return dict.fromkeys(sparse, 0.0)
    if isinstance(config, TwoFourConfig):
        return dict.fromkeys(sparse, config.level)
    explicit_levels = {
        name: layer_level.level
        for layer_level in config.levels
        for name in match_layers(sparse, layer_level.layers)
    }
    rest = {name: shapes[name] for name in sparse if name not in explicit_levels}
    if config.distribution == "uniform":
        spread = dict.fromkeys(rest, config.level)
    else:
        spread = erdos_renyi(rest, config.level)
    return {name: explicit_levels.get(name, spread.get(name, 0.0)) for name in sparse}


def erdos_renyi(shapes: Shapes, level: float) -> dict[str, float]:
    """Return levels with which a layer keeps weights in proportion to its rows plus columns.

    All layers together keep the share 1 - level. A layer that would keep more than all its weights
    becomes dense, and the others share the remainder (Evci et al., arXiv 1911.11134, section 3).
    """
    dense: set[str] = set()
    while True:
        rest = {name: shape for name, shape in shapes.items() if name not in dense}
        if not rest:
            return dict.fromkeys(shapes, 0.0)
        num_kept = (1 - level) * sum(rows * columns for rows, columns in shapes.values())
        # Dense layers use up a part of the weights to keep.
        num_kept -= sum(rows * columns for rows, columns in (shapes[name] for name in dense))
        scale = num_kept / sum(rows + columns for rows, columns in rest.values())
        shares = {name: scale * (m + n) / (m * n) for name, (m, n) in rest.items()}
        # A dense layer changes the scale, which may fill further layers: hence the loop.
        full = {name for name, share in shares.items() if share > 1}
        if not full:
            return {name: 1 - shares.get(name, 1.0) for name in shapes}
        dense |= full


Problem = tuple[tuple[str, ...], str]
"""Path of the key to change, and one line about it."""
_GROUP_OF_FOUR = 4
_NUM_NEAREST = 3


def sparsity_problems(config: AnySparsity, shapes: Shapes) -> Iterator[Problem]:
    """Yield one problem for each key that cannot work."""
    yield from _unknown_layers(("layers",), config.layers, shapes)
    sparse = {name: shapes[name] for name in match_layers(shapes, config.layers)}
    if isinstance(config, LevelKeys):
        for number, layer_level in enumerate(config.levels):
            path = ("levels", str(number), "layers")
            yield from _unknown_layers(path, layer_level.layers, sparse)
    if isinstance(config, BlockConfig):
        line = "expected a divisor of the {rows} rows and {columns} columns of {name}"
        both = config.block, config.block
        yield from _find_misfit(sparse, "block", both, f"{config.block}: {line}")
    if isinstance(config, TwoFourConfig):
        line = (
            "'two_four': expected layers with rows of a multiple of four weights, not {columns} "
            "as in {name}; leave it out of sparsity.layers"
        )
        yield from _find_misfit(sparse, "method", (1, _GROUP_OF_FOUR), line)
        if config.kernels:
            line = (
                f"true: expected layers of multiples of {MULTIPLE} rows and columns, not "
                "{rows} by {columns} as {name}; leave it out of sparsity.layers"
            )
            yield from _find_misfit(sparse, "kernels", (MULTIPLE, MULTIPLE), line)


def _unknown_layers(
    path: tuple[str, ...], patterns: Sequence[str], shapes: Shapes
) -> Iterator[Problem]:
    for number, pattern in enumerate(patterns):
        if not match_layers(shapes, [pattern]):
            where = ".".join(("sparsity", *path, str(number)))
            yield (
                (*path, str(number)),
                f"{where}: {pattern!r}: no layer has that name; the nearest: "
                f"{', '.join(_nearest(pattern, shapes))}",
            )


def _nearest(pattern: str, shapes: Shapes) -> list[str]:
    """Return the names most similar to the pattern, with `*` for numbers."""
    # Equal layers of different blocks would otherwise fill the suggestions.
    names = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in shapes))
    return get_close_matches(pattern, names, n=_NUM_NEAREST, cutoff=0.0)


def _find_misfit(
    sparse: Shapes, key: str, multiples: tuple[int, int], line: str
) -> Iterator[Problem]:
    """Yield a problem for the first layer whose rows or columns are not such multiples."""
    for name, (rows, columns) in sparse.items():
        if rows % multiples[0] or columns % multiples[1]:
            yield (key,), f"sparsity.{key}: " + line.format(name=name, rows=rows, columns=columns)
            return


_FLOPS_OF_ZERO, _FLOPS_OF_ZERO_WITH_GRADIENT = 6, 4
_FORWARD_AND_BACKWARD = 3
"""FLOPs of forward and backward over those of the forward pass."""


def flops_of_zeros(zeros: int, tokens: int, *, dense_gradient: bool = False) -> int:
    """Return the FLOPs of forward and backward that a device which skips zeros saves.

    Args:
        zeros: number of weights held at zero, each applied once to every token.
        tokens: tokens of the global batch.
        dense_gradient: whether the gradients of all weights are needed.
    """
    return (_FLOPS_OF_ZERO_WITH_GRADIENT if dense_gradient else _FLOPS_OF_ZERO) * zeros * tokens


@dataclass(frozen=True, kw_only=True)
class SparsityPlan:
    """The sparsity of a phase, by layer."""

    method: str
    """`dense` without zeros."""
    shapes: Shapes
    """Rows and columns of the sparse layers."""
    zeros: Mapping[str, int]
    """Number of zeros by layer."""
    seq_len: int
    """Tokens of the sample for which FLOPs of forward and backward are counted."""
    flops_dense: int
    """FLOPs by the workload's formula, including products with zeros."""
    flops: float
    """FLOPs without products with zeros; the mean over the phase if some steps need the
    gradients of all weights."""

    @property
    def level(self) -> float:
        """Share of zeros in the sparse layers' weights."""
        weights = sum(rows * columns for rows, columns in self.shapes.values())
        return sum(self.zeros.values()) / weights if weights else 0.0

    @property
    def times_fewer(self) -> float:
        """FLOPs when dense over FLOPs when sparse."""
        return self.flops_dense / self.flops


def sparsity_plan(
    config: AnySparsity | None, shapes: Shapes, *, work: WorkModel, seq_len: int, steps: int
) -> SparsityPlan:
    """Return the plan of a phase.

    Raises:
        UserError: a file of masks is missing or belongs to another model.
    """
    zeros = zeros_by_layer(config, shapes) if config else {}
    dense = _FORWARD_AND_BACKWARD * int(work(seq_len))
    number = sum(zeros.values())
    updates = _num_updates(config, steps) / steps
    # A step that updates masks needs the gradients of all weights, and saves less.
    saved_flops = flops_of_zeros(number, seq_len) * (1 - updates)
    saved_flops += flops_of_zeros(number, seq_len, dense_gradient=True) * updates
    return SparsityPlan(
        method=config.method if config else "dense",
        shapes={name: shapes[name] for name in zeros},
        zeros=zeros,
        seq_len=seq_len,
        flops_dense=dense,
        flops=dense - saved_flops,
    )


def zeros_by_layer(config: AnySparsity, shapes: Shapes) -> dict[str, int]:
    """Return the number of weights held at zero, by layer."""
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


def _num_updates(config: AnySparsity | None, steps: int) -> int:
    """Return the number of steps in a phase that need the gradients of all weights."""
    if not isinstance(config, RiglConfig):
        return 0
    every = config.schedule.every
    return sum(drop_fraction(config, step, steps) > 0 for step in range(every, steps + 1, every))
