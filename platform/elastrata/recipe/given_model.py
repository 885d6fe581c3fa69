"""The model of a recipe that names none, and begins with weights: theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastrata.checkpoints.weights_folder import CONFIG, weights_folder
from elastrata.core.counterpart import HasCounterpart
from elastrata.core.installed import installed_workloads
from elastrata.core.workload import workload_class
from elastrata.recipe.begin_with import BeginConfig, is_run
from elastrata.recipe.yaml_values import read_stored
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_KEY = "begin_with.weights"


def given_workload(begin: BeginConfig) -> dict[str, Any]:
    """The section `workload` of the model that has these weights.

    Raises:
        UserError: there are none, or no workload that is installed has such a model.
    """
    try:
        if is_run(begin.place):
            return _of_run(Storage(begin.place))
        folder = weights_folder(begin.place, begin.revision)
        return _of_config(folder.config(), folder.storage.uri(CONFIG))
    except UserError as error:
        raise UserError(*(f"{_KEY}: {line}" for line in error.problems)) from None


def _of_run(run: Storage) -> dict[str, Any]:
    try:
        values = read_stored(run, "recipe.yaml")
    except FileNotFoundError:
        raise UserError(f"{run.uri('recipe.yaml')}: missing") from None
    found = values.get("workload") if isinstance(values, Mapping) else None
    if not isinstance(found, dict):
        raise UserError(f"{run.uri('recipe.yaml')}: damaged: no workload")
    return found


def _of_config(config: Any, where: str) -> dict[str, Any]:
    names = sorted(installed_workloads())
    for name in names:
        workload = workload_class(name)
        settings = workload.settings_of(config) if issubclass(workload, HasCounterpart) else None
        if settings is not None:
            return {"name": name, **settings}
    raise UserError(
        f"{where}: a {config.model_type}: no such workload is installed, of {', '.join(names)}"
    )
