"""The run's folder: which recipes continue a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastrata.recipe.recipe import Recipe
from elastrata.runs.folder import RECIPE_FILE, DataSet, RunIdentity, check_same_run, write_identity
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe

IDENTITY = RunIdentity(name="r", data=(DataSet(url="d", fingerprint="f"),))


def test_keys_that_came_later_do_not_make_another_run(tmp_path: Path) -> None:
    run, recipe = Storage(str(tmp_path)), Recipe.model_validate(tiny_recipe("d", "runs"))
    write_identity(run, IDENTITY, recipe)
    kept = yaml.safe_load(run.read(RECIPE_FILE))
    del kept["optimizer"]["name"], kept["schedule"]["power"], kept["batch_size_warmup"]
    run.write(yaml.safe_dump(kept).encode(), RECIPE_FILE)
    check_same_run(run, IDENTITY, recipe, IDENTITY.data)
    lamb = Recipe.model_validate(tiny_recipe("d", "runs", optimizer={"name": "lamb", "lr": 1e-3}))
    with pytest.raises(UserError, match=r"optimizer.name: 'adamw' in the run of this name, 'lamb'"):
        check_same_run(run, IDENTITY, lamb, IDENTITY.data)
