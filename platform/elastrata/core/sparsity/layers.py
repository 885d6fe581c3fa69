"""The layers of a workload that may be sparse, and how sparse each is to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from elastrata.core.first_weights import meta_model
from elastrata.core.optimizers.keys import block_matrices
from elastrata.core.sparsity.config import AnySparsity, GivenConfig, TwoFourConfig
from elastrata_pipelines.format import Vocabulary

if TYPE_CHECKING:  # it knows this package
    from elastrata.core.workload import Workload

WEIGHT = ".weight"
"""The end of a layer's parameter's name."""
Shapes = Mapping[str, tuple[int, int]]
"""Rows and columns of layers by name."""


def layer_shapes(workload: Workload) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix that may be sparse, by the layer's name.

    They do not depend on the vocabulary. Takes neither memory nor data.
    """
    vocabulary = Vocabulary(size=8, pad_id=0, mask_id=1, special_ids=(), continuation_ids=())
    model = meta_model(lambda: workload.build_model(vocabulary, seq_len=1))
    matrices = sparse_matrices(model, workload.blocks(model))
    return {layer_of(name): (m.shape[0], m.shape[1]) for name, m in matrices.items()}


def sparse_matrices(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that may be held at zero, by name: the matrices of the blocks, each of which
    is applied once to every token.

    Args:
        model: plain or sharded, with its numbers or without.
        blocks: its repeated blocks.
    """
    return block_matrices(dict(model.named_parameters()), blocks)


def layer_of(parameter: str) -> str:
    """The name of the layer whose weight a parameter is."""
    return parameter.removesuffix(WEIGHT)


def layers_named(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that any of `patterns` is or stands for, in their order."""
    wanted = list(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


def layer_levels(config: AnySparsity, shapes: Shapes) -> dict[str, float]:
    """The share of weights that is to be zero, of every layer that is to be sparse; 0 where a file
    says which.

    Args:
        config: a recipe's.
        shapes: of all layers that may be sparse.
    """
    sparse = layers_named(shapes, config.layers)
    if isinstance(config, GivenConfig):
        return dict.fromkeys(sparse, 0.0)
    if isinstance(config, TwoFourConfig):
        return dict.fromkeys(sparse, config.level)
    own = {
        name: given.level for given in config.levels for name in layers_named(sparse, given.layers)
    }
    rest = {name: shapes[name] for name in sparse if name not in own}
    if config.distribution == "uniform":
        spread = dict.fromkeys(rest, config.level)
    else:
        spread = erdos_renyi(rest, config.level)
    return {name: own.get(name, spread.get(name, 0.0)) for name in sparse}


def erdos_renyi(shapes: Shapes, level: float) -> dict[str, float]:
    """Levels so that a layer keeps weights in proportion to its rows plus its columns, and all
    layers together the share 1 - level.

    A layer that would keep more than it has is dense, and the others share what is left (Evci et
    al., arXiv 1911.11134, section 3).
    """
    dense: set[str] = set()
    while True:
        rest = {name: shape for name, shape in shapes.items() if name not in dense}
        if not rest:
            return dict.fromkeys(shapes, 0.0)
        kept = (1 - level) * sum(rows * columns for rows, columns in shapes.values())
        kept -= sum(rows * columns for rows, columns in (shapes[name] for name in dense))
        scale = kept / sum(rows + columns for rows, columns in rest.values())
        shares = {name: scale * (m + n) / (m * n) for name, (m, n) in rest.items()}
        full = {name for name, share in shares.items() if share > 1}
        if not full:
            return {name: 1 - shares.get(name, 1.0) for name in shapes}
        dense |= full
