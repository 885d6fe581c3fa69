"""Training from Python: it shows how it goes, and its result can be asked all there is to know."""

from __future__ import annotations

import inspect
import io
import re
import sys
from pathlib import Path

import pytest

import elastrata
from elastrata import Recipe, TrainResult
from support.synthetic import tiny_recipe, write_data_set


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("api")
    write_data_set(folder / "data", samples=150, held_out=40)
    values = tiny_recipe(folder / "data", folder / "runs", name="first", batch_size=25)
    del values["steps"]
    workers = {**values["workers"], "max": "auto"}
    values |= {"epochs": 1, "workers": workers, "evaluation": {"every": 2, "samples": 32}}
    return Recipe.model_validate(values)


@pytest.fixture(scope="module")
def trained(recipe: Recipe, ray_local: None) -> tuple[TrainResult, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out := io.StringIO())
        result = elastrata.train(recipe)
    return result, out.getvalue()


def test_the_history_is_a_table(trained: tuple[TrainResult, str]) -> None:
    table = trained[0].history
    assert list(table.index) == [1, 2, 3, 4, 5, 6]
    assert table["samples"].iloc[-1] == 150 == trained[0].samples_seen
    assert table["loss"].iloc[-1] == trained[0].final_loss
    assert list(table["eval/loss"].notna()) == [False, True, False, True, False, True]


def test_an_evaluation_anew_is_the_one_on_record(trained: tuple[TrainResult, str]) -> None:
    result = trained[0]
    last = result.history.iloc[-1]
    again = result.evaluate()
    # The same sums in the same order by one process, but with another number of threads.
    assert again["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-5)
    assert again.keys() == {name for name in last.index if name.startswith("eval/")}
    with pytest.raises(elastrata.UserError, match="expected newest, best or one of the steps"):
        result.evaluate(checkpoint="7")


def test_a_recipe_by_its_name_and_overrides_in_a_mapping(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(elastrata.UserError, match="nothing"):
        elastrata.train("bert/tiny", {"data.path": missing, "steps": 3, "workers.spares": False})
    with pytest.raises(elastrata.UserError, match=r"optimizer\.lrr"):
        elastrata.train("bert/tiny", ["optimizer.lrr=1"])


def test_a_recipe_in_a_mapping(tmp_path: Path) -> None:
    values = {"extends": "bert/tiny", "data": {"path": tmp_path}, "steps": 7}
    made = elastrata.load_recipe(
        values, {"optimizer.betas": (0.8, 0.9), "schedule.warmup_steps": 1}
    )
    assert made == elastrata.load_recipe(
        "bert/tiny",
        {
            **{"data.path": tmp_path, "steps": 7, "name": None},
            **{"optimizer.betas": [0.8, 0.9], "schedule.warmup_steps": 1},
        },
    )
    assert made.given is not None
    assert made.given.startswith("extends: bert/tiny\n")
    with pytest.raises(elastrata.UserError, match="name: missing"):
        elastrata.train(values)
    with pytest.raises(elastrata.UserError) as caught:
        elastrata.train({**values, "stepps": 1, "optimizer": {"lr": -1}})
    assert [line.partition(": expected")[0] for line in caught.value.problems] == [
        "recipe: optimizer.lr: -1",
        "recipe: stepps: 1: unknown key (did you mean 'steps'?)",
    ]
    with pytest.raises(elastrata.UserError, match=r"recipe: extends: nothing\.yaml: no such"):
        elastrata.train({"extends": "nothing.yaml", "name": "x"})


@pytest.mark.parametrize("name", [n for n in elastrata.__all__ if n[0].islower()])
def test_a_public_function_says_what_it_takes_returns_and_raises(name: str) -> None:
    function = getattr(elastrata, name)
    text = inspect.getdoc(function) or ""
    arguments, _, rest = text.partition("\nArgs:\n")[2].partition("\nReturns:\n")
    described = re.findall(r"^    (\w+): \S", arguments, flags=re.MULTILINE)
    assert described == list(inspect.signature(function).parameters)
    assert "\nRaises:\n" in rest
    assert "UserError: " in rest


def test_runs_are_found_by_name_as_the_commands_find_them(
    trained: tuple[TrainResult, str], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(recipe.storage).parent)
    assert elastrata.status("first").steps == 6
    with pytest.raises(elastrata.UserError, match="did you mean 'first'"):
        elastrata.status("frist")


def test_a_picture_an_export_and_an_audit(trained: tuple[TrainResult, str], tmp_path: Path) -> None:
    result = trained[0]
    assert {line.get_label() for line in result.plot().axes[0].get_lines()} >= {"held-out"}
    assert (result.export(tmp_path / "model") / "config.json").is_file()
    found = result.audit()
    assert found.partition_ok
    assert (found.digests_checked, found.epochs) == (6, (1.0,))


def test_the_commands_are_functions(trained: tuple[TrainResult, str]) -> None:
    result = trained[0]
    found = elastrata.status(result.run_dir)
    assert (found.state, found.steps, found.steps_in_all) == ("finished", 6, 6)
    data = Path(result.run_dir).parents[1] / "data"
    seen = elastrata.inspect(str(data), workers=3)
    assert (seen.samples, seen.workers, seen.batch_size) == (150, 3, 48)
    with pytest.raises(elastrata.UserError, match="expected a model that predicts the next token"):
        elastrata.generate(result.run_dir, "A text")


@pytest.mark.matrix  # a second run; tests/e2e/test_fork.py forks by the command
def test_a_fork_shows_what_changes_and_trains(trained: tuple[TrainResult, str]) -> None:
    parent = Path(trained[0].run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out := io.StringIO())
        result = elastrata.fork(f"{parent}@6", "second", ["steps=8", "schedule.shape=constant"])
    assert Path(result.run_dir) == parent.with_name("second")
    assert list(result.history.index) == [7, 8]
    assert re.search(r"^ *steps +6 +8 *$", out.getvalue(), re.MULTILINE), out.getvalue()
    with pytest.raises(elastrata.UserError, match="no checkpoint of step 60; the nearest is 6"):
        elastrata.fork(f"{parent}@60", "third")
    assert not parent.with_name("third").exists()
