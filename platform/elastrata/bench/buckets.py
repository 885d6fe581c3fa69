"""The buckets of a recipe's model: what FSDP2 gathers and reduces at once."""

from __future__ import annotations

import torch

from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.recipe import Recipe


def bucket_sizes(recipe: Recipe) -> list[int]:
    """Numbers in each block, first to last, and in what is left of the model.

    Raises:
        UserError: the size of the vocabulary is not known before the data is prepared.
    """
    spec = data_spec(recipe)
    with torch.device("meta"):
        model = recipe.workload.build_model(spec.vocabulary, spec.seq_len)
    blocks = [
        sum(parameter.numel() for parameter in block.parameters())
        for block in recipe.workload.blocks(model)
    ]
    whole = sum(parameter.numel() for parameter in model.parameters())
    return [*blocks, whole - sum(blocks)]
