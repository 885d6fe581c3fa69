"""A recipe's model, built without its numbers: its size, its inputs, what its optimizer does."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.optim.base import ParameterGroup
from elastrata.parallel.init_weights import meta_model
from elastrata.recipe.data_sets import DataSpec, as_if_full, data_spec
from elastrata.recipe.recipe import Recipe
from elastrata.sparsity.layers import SparsityPlan, layer_shapes, sparsity_plan
from elastrata.trainer.preflight import TrainingData
from elastrata.workload.workload import Workload
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.rows import Rows


@dataclass(frozen=True, kw_only=True)
class ModelInspection:
    """A recipe's model as its optimizer sees it."""

    vocabulary: int
    """Ids of the tokenizer; before the data is prepared, as many as it was asked for."""
    prepared: bool
    """Whether the recipe's data set is there."""
    groups: tuple[ParameterGroup, ...]
    """Those that have parameters; together all that are trained."""
    sparsity: tuple[SparsityPlan, ...]
    """The plan of every phase; empty where no phase has weights at zero."""


def inspect_model(recipe: Recipe) -> ModelInspection:
    """Builds the model on the meta device, where it takes neither memory nor time.

    Raises:
        UserError: the size of the vocabulary is not known before the data is prepared.
    """
    spec = data_spec(recipe)
    model = meta_model(lambda: recipe.workload.build_model(spec.vocabulary, spec.seq_len))
    groups = recipe.optimizer.groups(model, recipe.workload.blocks(model))
    return ModelInspection(
        vocabulary=spec.vocabulary.size,
        prepared=spec.prepared,
        groups=tuple(group for group in groups if group.parameters),
        sparsity=_sparsity(recipe, spec),
    )


def num_parameters(workload: Workload, data: TrainingData) -> int:
    """How many numbers a model has that trains on that data; shared ones count once."""
    model = meta_model(lambda: workload.build_model(data.vocabulary, data.seq_len))
    return sum(parameter.numel() for parameter in model.parameters())


def _sparsity(recipe: Recipe, spec: DataSpec) -> tuple[SparsityPlan, ...]:
    if not any(part.sparsity for part in recipe.parts):
        return ()
    recipe = as_if_full(recipe, spec.seq_len)
    shapes = layer_shapes(recipe.workload)
    work = recipe.workload.work(spec.vocabulary)
    return tuple(
        sparsity_plan(part.sparsity, shapes, work=work, seq_len=spec.seq_len, steps=part.num_steps)
        for part in recipe.parts
    )


def inputs_of(recipe: Recipe, rows: Rows, manifest: Manifest) -> list[int] | None:
    """The ids, samples end to end, in the epoch of the rows; None where they are the samples' own,
    or the workload's batches do not have one for every token.

    Raises:
        UserError: the recipe's workload cannot train on that data set.
    """
    if problems := recipe.workload.problems(manifest):
        raise UserError(*problems)
    batch = recipe.workload.collate(rows, manifest.vocabulary, recipe.seed)
    ids = getattr(batch, "input_ids", None)
    tokens = rows.tokens.tolist()
    if ids is None or tuple(ids.shape) != (len(tokens),) or ids.tolist() == tokens:
        return None
    return [int(token) for token in ids.tolist()]
