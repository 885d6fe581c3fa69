"""A value of a run's recipe, found without reading the recipe as a whole.

So a run can be looked at where its workload is not installed, and whatever else its recipe says.
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import ValidationError

from elastrata.runs.folder import RECIPE_FILE
from elastrata.training.target import TargetConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


def recipe_number(run: Storage, key: str) -> int:
    """The whole number under a dotted path, such as `data.window_stripes`.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    value = _read(run)
    try:
        for part in key.split("."):
            value = value[part]
        return int(value)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run.uri(RECIPE_FILE)}: damaged: {key}: {error!r}") from None


def recipe_target(run: Storage) -> TargetConfig | None:
    """The target; None where there is none, as in runs of old.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    recipe = _read(run)
    try:
        section = recipe.get("target")
        return None if section is None else TargetConfig.model_validate(section)
    except (AttributeError, ValidationError) as error:
        line = str(error).splitlines()[0]
        raise UserError(f"{run.uri(RECIPE_FILE)}: damaged: target: {line}") from None


def _read(run: Storage) -> Any:
    try:
        return yaml.safe_load(run.read(RECIPE_FILE))
    except FileNotFoundError:
        raise UserError(f"{run.uri(RECIPE_FILE)}: missing") from None
    except yaml.YAMLError as error:
        raise UserError(f"{run.uri(RECIPE_FILE)}: damaged: {error!r}") from None
