"""The recipe of a trial: the sweep's base with the trial's values in it."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from elastrata.recipe.data_sets import in_steps
from elastrata.recipe.file import load_recipe
from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.recipe.value_types import replaced_keys, type_below
from elastrata.recipe.yaml_reader import RecipeText, read_recipe_text
from elastrata.sweeps.space import Value
from elastrata.tracking.store import tracking_uri
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """The recipe that all trials of a sweep share. A value: it can be sent to any process."""

    values: Mapping[str, Any]
    """As it was written, without what nobody said: another optimizer has other keys."""
    recipe: Recipe
    """The values as a recipe, checked."""

    def trial(self, point: Mapping[str, Value]) -> Recipe:
        """The base with these values.

        Raises:
            UserError: they cannot be; a line for each reason.
        """
        tree = copy.deepcopy(dict(self.values))
        whole = self.recipe.model_dump(mode="json")
        for key, value in point.items():
            _set(tree, whole, key.split("."), value, kept=point.keys())
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError as error:
            text = RecipeText(file="", name="", values=tree)
            lines = [line.removeprefix(": ") for line in recipe_problems(error, Recipe, text)]
            raise UserError(*lines) from None
        if problems := [line for _, line in cross_field_problems(recipe)]:
            raise UserError(*problems)
        return in_steps(recipe)


def at_home(base: BaseRecipe) -> BaseRecipe:
    """The recipe with full paths of its data, as other processes need them."""
    values = copy.deepcopy(dict(base.values))
    for section in (values, *values.get("phases", ())):
        for name in ("data", "evaluation"):
            part = section.get(name)
            if isinstance(part, dict) and isinstance(part.get("path"), str):
                part["path"] = Storage(part["path"]).uri()
    return BaseRecipe(values=values, recipe=Recipe.model_validate(values))


def base_recipe(recipe: str, changes: Mapping[str, Any]) -> BaseRecipe:
    """Reads the base of a sweep.

    Args:
        recipe: its file or name.
        changes: values by dotted key.

    Raises:
        UserError: one line for each mistake in it.
    """
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    checked = load_recipe(recipe, overrides)
    return BaseRecipe(
        values=read_recipe_text(recipe, overrides, model=Recipe).values, recipe=checked
    )


def _set(
    tree: Any, whole: Any, path: list[str], value: Value, *, kept: Collection[str] = ()
) -> None:
    """Sets a value in a tree; lists on the way that nobody wrote are taken from the whole one. Keys
    of another alternative go, but for those that are `kept`."""
    annotation: Any = Recipe
    for place, part in enumerate(path[:-1]):
        annotation = type_below(annotation, tree, _key(tree, part))
        whole = _item(whole, part)
        if isinstance(whole, list) and _item(tree, part) is None:
            tree[part] = copy.deepcopy(whole)
        elif _item(tree, part) is None:
            tree[_key(tree, part)] = {}
        tree = _item(tree, path[place])
    if isinstance(tree, dict):
        for other in replaced_keys(annotation, tree, {path[-1]: value}):
            if ".".join((*path[:-1], other)) not in kept:
                del tree[other]
    tree[_key(tree, path[-1])] = value


def _item(tree: Any, part: str) -> Any:
    if isinstance(tree, list):
        return tree[int(part)]
    return tree.get(part) if isinstance(tree, Mapping) else None


def _key(tree: Any, part: str) -> Any:
    return int(part) if isinstance(tree, list) else part


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """A value: it can be sent to any process."""

    base: BaseRecipe
    folder: Storage
    """Every trial is a run in it."""
    threads: int
    """Threads of a worker, where the recipe does not say."""
    metric: str
    told: Mapping[str, int] = field(default_factory=dict)
    """By trial the step of the newest report that the sweep has had of it before."""

    def recipe(self, trial: str, point: Mapping[str, Value]) -> Recipe:
        """The recipe of a trial.

        Raises:
            UserError: its values cannot be.
        """
        recipe = self.base.trial(point)
        workers = recipe.workers
        if workers.threads is None:
            workers = workers.model_copy(update={"threads": self.threads})
        if workers.most > 1:
            workers = workers.model_copy(update={"spares": False})  # a trial is short
        base = self.base.recipe  # in whose storage the record of the whole sweep is
        uri = tracking_uri(base.tracking.uri, Storage(base.storage))
        changed = {
            "name": trial,
            "storage": self.folder.uri(),
            "workers": workers,
            "tracking": recipe.tracking.model_copy(update={"uri": uri}),
        }
        return recipe.model_copy(update=changed)
