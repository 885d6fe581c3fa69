"""A number of a run's recipe, found without reading the recipe as a whole.

So a run can be looked at where its workload is not installed, and whatever else its recipe says.
"""

from __future__ import annotations

import yaml

from elastrata.runs.folder import RECIPE_FILE
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


def recipe_number(run: Storage, key: str) -> int:
    """The whole number under a dotted path, such as `data.window_stripes`.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    try:
        value = yaml.safe_load(run.read(RECIPE_FILE))
        for part in key.split("."):
            value = value[part]
        return int(value)
    except FileNotFoundError:
        raise UserError(f"{run.uri(RECIPE_FILE)}: missing") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run.uri(RECIPE_FILE)}: damaged: {key}: {error!r}") from None
