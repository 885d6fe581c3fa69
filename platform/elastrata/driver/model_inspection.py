"""A recipe's model, built without weights: its size, its inputs and its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.optim.base import ParameterGroup
from elastrata.parallel.init_weights import meta_model
from elastrata.recipe.data_sets import DataSpec, assume_full_samples, data_spec
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
    """Ids of the tokenizer; before the data is prepared, the requested number."""
    prepared: bool
    """True if the recipe's data set exists."""
    groups: tuple[ParameterGroup, ...]
    """Non-empty parameter groups; together they have all trained parameters."""
    sparsity: tuple[SparsityPlan, ...]
    """The sparsity plan of every phase; empty if no phase is sparse."""


def inspect_model(recipe: Recipe) -> ModelInspection:
    """Inspect the model of a recipe, built on the meta device without memory for weights.

    Raises:
        UserError: the size of the vocabulary is unknown before the data is prepared.
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
    """Return the number of parameters of a model for this data; shared ones count once."""
    model = meta_model(lambda: workload.build_model(data.vocabulary, data.seq_len))
    return sum(parameter.numel() for parameter in model.parameters())


def _sparsity(recipe: Recipe, spec: DataSpec) -> tuple[SparsityPlan, ...]:
    if not any(part.sparsity for part in recipe.parts):
        return ()
    recipe = assume_full_samples(recipe, spec.seq_len)
    shapes = layer_shapes(recipe.workload)
    work = recipe.workload.work(spec.vocabulary)
    return tuple(
        sparsity_plan(part.sparsity, shapes, work=work, seq_len=spec.seq_len, steps=part.num_steps)
        for part in recipe.parts
    )


def compute_inputs(recipe: Recipe, rows: Rows, manifest: Manifest) -> list[int] | None:
    """Return the input ids of the rows, concatenated, as the workload makes them in the rows'
    epoch; None if they equal the samples' own ids, or if the workload has no input id for every
    token.

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
