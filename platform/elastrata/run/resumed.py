"""The recipe of a run that is resumed: what lies in its folder, with changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from tempfile import NamedTemporaryFile
from typing import Any

from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import RECIPE_FILE, RUN_FILE, read_identity
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


def resumed_recipe(run: Storage, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a run was started or last continued with, for going on in the same folder,
    from whatever folder the command runs in.

    Args:
        run: its folder.
        overrides: `dotted.path=value`, the value in YAML.

    Raises:
        UserError: there is no such run, its recipe is damaged, or a mistake in the overrides.
    """
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    try:
        text = run.read(RECIPE_FILE)
    except FileNotFoundError:
        raise UserError(f"{run.uri(RECIPE_FILE)}: missing") from None
    places: dict[str, Any] = {"name": identity.name, "storage": run.uri().rpartition("/")[0]}
    for number, data_set in enumerate(identity.data):
        prefix = f"phases.{number}." if len(identity.data) > 1 else ""
        places[f"{prefix}data.path"] = data_set.url
    written = [f"{key}={json.dumps(value)}" for key, value in places.items()]
    with NamedTemporaryFile(suffix=".yaml") as copy:
        copy.write(text)
        copy.flush()
        try:
            return load_recipe(copy.name, [*written, *overrides])
        except UserError as error:
            named = (line.replace(copy.name, run.uri(RECIPE_FILE)) for line in error.problems)
            raise UserError(*named) from None
