"""The layers of a workload that may be sparse, found without its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from elastrata.core.meta_model import meta_model
from elastrata.core.optimizers.groups import block_matrices
from elastrata_pipelines.format import Vocabulary

if TYPE_CHECKING:  # it knows this package
    from elastrata.core.workload import Workload

WEIGHT = ".weight"
"""What the parameter of a layer is called."""


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
