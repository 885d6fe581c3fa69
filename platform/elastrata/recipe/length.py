"""The length of a run in steps, where its recipe gives it in epochs or tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.recipe.shares import mean_tokens
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import MANIFEST, Manifest
from elastrata_pipelines.groups import steps_for
from elastrata_pipelines.storage import Storage

Part = TypeVar("Part", bound=PhaseKeys)


def in_steps(recipe: Recipe) -> Recipe:
    """The recipe with `steps` in the place of `epochs` and `tokens`, by the data sets that are
    there; a phase whose data set is not stays as it is.

    Raises:
        UserError: a data set cannot be read, or the steps are too few for the recipe's schedule.
    """
    if all(part.steps is not None for part in recipe.parts):
        return recipe
    if recipe.phases:
        counted = recipe.model_copy(update={"phases": tuple(map(_counted, recipe.phases))})
    else:
        counted = _counted(recipe)
    if problems := [line for _, line in cross_field_problems(counted)]:
        raise UserError(*problems)
    return counted


def as_if_full(recipe: Recipe, seq_len: int) -> Recipe:
    """The recipe with `steps` in the place of `tokens`, of samples that are all of full length, as
    the planner counts them: for where the data that would tell is not there.

    Args:
        recipe: of which a phase that says `epochs` stays as it is.
        seq_len: tokens of every sample.
    """
    if recipe.phases:
        phases = tuple(full_part(part, seq_len) for part in recipe.phases)
        return recipe.model_copy(update={"phases": phases})
    return full_part(recipe, seq_len)


def full_part(part: Part, seq_len: int) -> Part:
    """A phase as if its batches were full throughout."""
    if part.steps is not None or part.tokens is None:
        return part
    samples = -(-part.tokens // seq_len)
    steps = steps_for(samples, full=part.batch_size, warmup=part.batch_size_warmup)
    return part.model_copy(update={"steps": steps, "tokens": None})


def samples_of(part: PhaseKeys, manifests: Sequence[Manifest]) -> int:
    """Samples of a phase whose length is given in epochs or tokens of its data.

    Args:
        part: the phase.
        manifests: of its data sets.
    """
    if part.epochs is not None:
        return max(1, round(part.epochs * manifests[0].samples))
    assert part.tokens is not None, part
    if part.data.sources:
        return max(1, math.ceil(part.tokens / mean_tokens(part.data, manifests)))
    return max(1, -(-part.tokens * manifests[0].samples // manifests[0].tokens))


def _counted(part: Part) -> Part:
    data_sets = [Storage(place) for place in part.data.places.values()]
    if part.steps is not None or not all(data_set.exists(MANIFEST) for data_set in data_sets):
        return part
    steps = steps_for(
        samples_of(part, list(map(Manifest.read, data_sets))),
        full=part.batch_size,
        warmup=part.batch_size_warmup,
    )
    return part.model_copy(update={"steps": steps, "epochs": None, "tokens": None})
