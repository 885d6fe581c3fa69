"""What a recipe's optimizer would do with its model: the model is built without its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastrata.recipe.data import DataConfig
from elastrata.recipe.recipe import Recipe
from elastrata.training.optimizers.groups import ParameterGroup
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.format.manifest import MANIFEST
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class ModelInspection:
    """A recipe's model as its optimizer sees it."""

    vocabulary: int
    """Ids of the tokenizer; before the data is prepared, as many as it was asked for."""
    prepared: bool
    """Whether the recipe's data set is there."""
    groups: tuple[ParameterGroup, ...]
    """Those that have parameters; together all that are trained."""


def inspect_model(recipe: Recipe) -> ModelInspection:
    """Builds the model on the meta device, where it takes neither memory nor time.

    Raises:
        UserError: the size of the vocabulary is not known before the data is prepared.
    """
    data = recipe.parts[0].data
    storage = Storage(data.path)
    prepared = storage.exists(MANIFEST)
    if prepared:
        manifest = Manifest.read(storage)
        vocabulary, seq_len = manifest.vocabulary, manifest.seq_len
    else:
        vocabulary, seq_len = _planned(data)
    with torch.device("meta"):
        model = recipe.workload.build_model(vocabulary, seq_len)
    groups = recipe.optimizer.groups(model, recipe.workload.blocks(model))
    return ModelInspection(
        vocabulary=vocabulary.size,
        prepared=prepared,
        groups=tuple(group for group in groups if group.parameters),
    )


def _planned(data: DataConfig) -> tuple[Vocabulary, int]:
    """The vocabulary and the longest sample that `elastrata prepare` is to make."""
    prepare = data.prepare
    if prepare is None or prepare.tokenizer.train is None:
        raise UserError(
            f"data.path: {data.path}: no data set here, whose tokenizer gives the model its "
            "size; make it with `elastrata prepare`"
        )
    size = prepare.tokenizer.vocab_size
    vocabulary = Vocabulary(size=size, pad_id=0, mask_id=1, special_ids=(), continuation_ids=())
    return vocabulary, prepare.seq_len
