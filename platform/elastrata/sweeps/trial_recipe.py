"""The recipe of a trial: the sweep's base recipe with the trial's values."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from elastrata.recipe.data_sets import resolve_steps
from elastrata.recipe.file import load_recipe
from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.recipe.value_types import obsolete_keys, type_below
from elastrata.recipe.yaml_reader import RecipeText, read_recipe_text
from elastrata.sweeps.space import Value
from elastrata.tracking.store import tracking_uri
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """Recipe that all trials of a sweep share. It can be pickled and sent to any process."""

    values: Mapping[str, Any]
    """The values as written, without defaults, because another optimizer has other keys."""
    recipe: Recipe
    """The validated recipe of the values."""

    def trial(self, point: Mapping[str, Value]) -> Recipe:
        """Return the base recipe with the values of a point.

        Raises:
            UserError: the values are invalid; one line per reason.
        """
        tree = copy.deepcopy(dict(self.values))
        whole = self.recipe.model_dump(mode="json")
        for key, value in point.items():
            _set_value(tree, whole, key.split("."), value, kept=point.keys())
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError as error:
            text = RecipeText(file="", name="", values=tree)
            # Values of a trial have no file and line to name.
            lines = [line.removeprefix(": ") for line in recipe_problems(error, Recipe, text)]
            raise UserError(*lines) from None
        if problems := [line for _, line in cross_field_problems(recipe)]:
            raise UserError(*problems)
        return resolve_steps(recipe)


def with_absolute_paths(base: BaseRecipe) -> BaseRecipe:
    """Return the base recipe with absolute data paths, which processes with another working
    directory need."""
    values = copy.deepcopy(dict(base.values))
    for section in (values, *values.get("phases", ())):
        for name in ("data", "evaluation"):
            part = section.get(name)
            if isinstance(part, dict) and isinstance(part.get("path"), str):
                part["path"] = Storage(part["path"]).uri()
    return BaseRecipe(values=values, recipe=Recipe.model_validate(values))


def base_recipe(recipe: str, changes: Mapping[str, Any]) -> BaseRecipe:
    """Read and check the base recipe of a sweep.

    Args:
        recipe: the recipe's file or name.
        changes: values by dotted key.

    Raises:
        UserError: one line per mistake in the recipe.
    """
    # JSON is valid YAML, in which overrides are parsed.
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    base = load_recipe(recipe, overrides)
    return BaseRecipe(values=read_recipe_text(recipe, overrides, model=Recipe).values, recipe=base)


def _set_value(
    tree: Any, complete: Any, path: list[str], value: Value, *, kept: Collection[str] = ()
) -> None:
    """Set a value in a tree of recipe values, in place.

    A list on the path that the tree lacks is copied from the complete recipe first. Keys of the
    alternative that the value replaces are deleted, except those in `kept`.
    """
    annotation: Any = Recipe
    for position, part in enumerate(path[:-1]):
        annotation = type_below(annotation, tree, _parse_key(tree, part))
        complete = _get_item(complete, part)
        # An index into a list only makes sense with the list's other items.
        if isinstance(complete, list) and _get_item(tree, part) is None:
            tree[part] = copy.deepcopy(complete)
        elif _get_item(tree, part) is None:
            tree[_parse_key(tree, part)] = {}
        tree = _get_item(tree, path[position])
    if isinstance(tree, dict):
        for other in obsolete_keys(annotation, tree, {path[-1]: value}):
            if ".".join((*path[:-1], other)) not in kept:
                del tree[other]
    tree[_parse_key(tree, path[-1])] = value


def _get_item(tree: Any, part: str) -> Any:
    if isinstance(tree, list):
        return tree[int(part)]
    return tree.get(part) if isinstance(tree, Mapping) else None


def _parse_key(tree: Any, part: str) -> Any:
    return int(part) if isinstance(tree, list) else part


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """Description of a sweep's trials. It can be pickled and sent to any process."""

    base: BaseRecipe
    folder: Storage
    """The folder in which every trial is a run."""
    threads: int
    """CPU threads of a worker, unless the recipe sets them."""
    metric: str
    told: Mapping[str, int] = field(default_factory=dict)
    """By trial, the step of the newest report that the sweep has already received."""

    def recipe(self, trial: str, point: Mapping[str, Value]) -> Recipe:
        """Return the recipe of a trial.

        Raises:
            UserError: the trial's values are invalid.
        """
        recipe = self.base.trial(point)
        workers = recipe.workers
        if workers.threads is None:
            workers = workers.model_copy(update={"threads": self.threads})
        if workers.most > 1:
            # A trial is too short for spare processes to pay off.
            workers = workers.model_copy(update={"spares": False})
        # The record of the whole sweep is in the storage of the base recipe.
        base = self.base.recipe
        uri = tracking_uri(base.tracking.uri, Storage(base.storage))
        updates = {
            "name": trial,
            "storage": self.folder.uri(),
            "workers": workers,
            "tracking": recipe.tracking.model_copy(update={"uri": uri}),
        }
        return recipe.model_copy(update=updates)
