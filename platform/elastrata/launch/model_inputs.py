"""Model inputs: the ids that a recipe's model is shown of some samples, masks and all."""

from __future__ import annotations

from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.rows import Rows


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
