"""The run's folder: which recipes continue a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import (
    RECIPE_FILE,
    DataSet,
    RunIdentity,
    check_same_run,
    read_identity,
    read_recipe,
    read_resumed_recipe,
    write_identity,
)
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


@pytest.mark.parametrize("read", [read_recipe, lambda run, _: read_resumed_recipe(run)])
def test_a_recipe_that_was_cut_is_not_taken_for_another(
    tmp_path: Path, read: Callable[[Storage, RunIdentity], Recipe]
) -> None:
    """The workload comes last: without its sizes it would be one of the default sizes."""
    run, recipe = Storage(str(tmp_path)), Recipe.model_validate(tiny_recipe("d", "runs"))
    write_identity(run, IDENTITY, recipe)
    identity = read_identity(run)
    assert identity is not None
    whole = run.read(RECIPE_FILE)
    run.write(whole[: whole.index(b"hidden_size")], RECIPE_FILE)
    with pytest.raises(UserError, match=r"recipe\.yaml: altered since .*; put back what it was"):
        read(run, identity)


def _continued(tmp_path: Path, before: dict[str, object], now: dict[str, object]) -> None:
    run = Storage(str(tmp_path))
    write_identity(run, IDENTITY, Recipe.model_validate(before))
    check_same_run(run, IDENTITY, Recipe.model_validate(now), IDENTITY.data)


def test_a_run_of_constant_rate_may_get_more_steps(tmp_path: Path) -> None:
    constant = {"schedule": {"shape": "constant", "warmup_steps": 1}}
    recipe = tiny_recipe("d", "runs", **constant)
    _continued(tmp_path, recipe, {**recipe, "steps": 50})
    with pytest.raises(UserError, match="steps: 2 in the run of this name, 1 in this recipe"):
        _continued(tmp_path, recipe, {**recipe, "steps": 1, "schedule": {"shape": "constant"}})
    changed = {"shape": "constant", "warmup_steps": 2}
    with pytest.raises(UserError, match=r"schedule.warmup_steps: 1 in the run of this name, 2"):
        _continued(tmp_path, recipe, {**recipe, "steps": 50, "schedule": changed})


def test_a_schedule_that_ends_says_how_to_go_on(tmp_path: Path) -> None:
    recipe = tiny_recipe("d", "runs")
    with pytest.raises(UserError, match=r"steps are a new phase, as in phases: \[\{\}, \{steps:"):
        _continued(tmp_path, recipe, {**recipe, "steps": 50})


def test_a_run_may_get_another_phase(tmp_path: Path) -> None:
    recipe = tiny_recipe("d", "runs")
    more = {"steps": 7, "optimizer": {"lr": 1e-4}}
    longer = {**recipe, "phases": [{}, more]}
    _continued(tmp_path, recipe, longer)
    _continued(tmp_path, longer, {**longer, "phases": [{}, more, {"steps": 3}]})
    with pytest.raises(UserError, match=r"phases.0.batch_size: 21 in the run of this name, 20"):
        _continued(tmp_path, recipe, {**recipe, "phases": [{"batch_size": 20}, more]})
    with pytest.raises(UserError, match=r"phases.1.steps: 7 in the run of this name, None"):
        _continued(tmp_path, longer, recipe)
