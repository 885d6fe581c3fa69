"""The run's folder: which recipes continue a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import with_given
from elastrata.run.claim import folder_kind
from elastrata.run.folder import (
    GIVEN_FILE,
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
    with pytest.raises(UserError, match=r"recipe\.yaml: altered since .*; restore the file"):
        read(run, identity)


def test_the_short_recipe_is_kept_as_it_was_given(tmp_path: Path) -> None:
    short = "# why so short\nextends: bert/tiny  # the base\ndata: {path: d}\n"
    (tmp_path / "mine.yaml").write_text(short, encoding="utf-8")
    run = Storage(str(tmp_path / "run"))
    recipe = load_recipe(str(tmp_path / "mine.yaml"), ["optimizer.lr=3e-4", "steps=7"])
    # As the driver changes it, and as a job receives it.
    write_identity(run, IDENTITY, recipe.model_copy(update={"steps": 8}))
    expected = f"{short}# with\n# optimizer.lr=3e-4\n# steps=7\n"
    assert run.read(GIVEN_FILE).decode() == expected
    (tmp_path / "job.yaml").write_text(with_given(recipe.given, to_yaml(recipe)), encoding="utf-8")
    shipped = load_recipe(str(tmp_path / "job.yaml"), ["name=x"])
    assert shipped.given == f"{expected}# with\n# name=x\n"
    assert shipped == recipe.model_copy(update={"name": "x"})
    assert read_resumed_recipe(run).given == expected
    assert read_resumed_recipe(run, ["steps=9"]).given == f"{expected}# with\n# steps=9\n"
    # It can be used again, and nothing else reads it.
    run.write(b"steps: [", GIVEN_FILE)
    assert read_resumed_recipe(run).steps == 8
    assert load_recipe("bert/tiny", ["data.path=d"]).given == (
        "extends: bert/tiny\n# with\n# data.path=d\n"
    )
    assert recipe == Recipe.model_validate(recipe.model_dump())
    assert "given" not in to_yaml(recipe)


def test_a_recipe_made_in_python_has_no_short_form(tmp_path: Path) -> None:
    run, recipe = Storage(str(tmp_path)), Recipe.model_validate(tiny_recipe("d", "runs"))
    write_identity(run, IDENTITY, recipe)
    assert not run.exists(GIVEN_FILE)
    assert read_resumed_recipe(run).given is None


def test_a_kill_between_the_recipes_and_the_run_file_leaves_a_folder_to_use(tmp_path: Path) -> None:
    for name in ("driver.json", RECIPE_FILE, GIVEN_FILE):
        (tmp_path / name).write_bytes(b"")
    assert folder_kind(Storage(str(tmp_path))) == "nothing"


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
