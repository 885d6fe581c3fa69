"""Sweeps on disk: read with all mistakes told at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from elastrata.recipe.problems import misread_booleans, recipe_problems
from elastrata.recipe.yaml_reader import RecipeText, read_recipe_text
from elastrata.recipe.yaml_values import parse_yaml
from elastrata.sweeps.rules import key_problems, metric_problems, sweep_problems
from elastrata.sweeps.sweep import SweepConfig
from elastrata.sweeps.trial_recipe import BaseRecipe, base_recipe
from elastrata_pipelines.errors import UserError


def load_sweep(path: str, overrides: Sequence[str] = ()) -> SweepConfig:
    """Reads a sweep.

    Args:
        path: a YAML file. A recipe that it names as a file lies beside it.
        overrides: `key=value`, the value in YAML: of the sweep where it has such a key, else a
            dotted key of the recipe, which all trials then have.

    Raises:
        UserError: one line per mistake, in the sweep, its recipe and its space.
    """
    text = _text(path, overrides)
    misread = misread_booleans(SweepConfig, text)
    try:
        config = SweepConfig.model_validate(text.values)
    except ValidationError as error:
        problems = recipe_problems(error, SweepConfig, text)
        raise UserError(*problems, *misread, *_more(text.values, path)) from None
    if misread:
        raise UserError(*misread, *_more(text.values, path))
    check_sweep(config, path)
    return config


def check_sweep(config: SweepConfig, origin: str = "sweep") -> BaseRecipe:
    """Finds everything that cannot work in a sweep, and returns its base.

    Args:
        config: the sweep.
        origin: what the lines call it.

    Raises:
        UserError: one line for each mistake.
    """
    base = base_recipe(config.recipe, config.changes)
    if problems := sweep_problems(config, base):
        raise UserError(*(f"{origin}: {line}" for line in problems))
    return base


def changes_of(overrides: Sequence[str]) -> dict[str, Any]:
    """By dotted key the values that a command line gives keys of the recipe.

    Raises:
        UserError: one of them is not `key=value`.
    """
    changes = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"command line: {override}: expected key=value, such as trials=8")
        changes[key] = parse_yaml(value, f"command line: {key}: {value}", count_lines=False)
    return changes


def _text(path: str, overrides: Sequence[str]) -> RecipeText:
    """The file's values, with what the command line says put where it belongs."""
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such sweep file")
    own: list[str] = []
    of_recipe: list[str] = []
    for override in overrides:
        is_own = override.partition("=")[0].split(".")[0] in SweepConfig.model_fields
        (own if is_own else of_recipe).append(override)
    text = read_recipe_text(path, own, model=SweepConfig)
    text.values.setdefault("name", text.name)
    changes = text.values.setdefault("changes", {})
    if isinstance(changes, dict):
        changes.update(changes_of(of_recipe))
    recipe = text.values.get("recipe")
    # Not pathlib's: it raises for names that are too long.
    if isinstance(recipe, str) and os.path.isfile(beside := Path(path).parent / recipe):  # noqa: PTH113
        text.values["recipe"] = str(beside)
    return text


def _more(values: Any, path: str) -> list[str]:
    """What is wrong beside what does not fit the model of a sweep, as far as that can be told."""
    recipe, changes = values.get("recipe"), values.get("changes")
    if not isinstance(recipe, str) or not isinstance(changes, dict):
        return []
    try:
        base = base_recipe(recipe, changes)
    except UserError as error:
        return list(error.problems)
    space, metric = values.get("space"), values.get("metric")
    lines = [*key_problems(space if isinstance(space, dict) else [], base.recipe)]
    if isinstance(metric, str):
        lines += metric_problems(metric, base.recipe.workload)
    return [f"{path}: {line}" for line in lines]
