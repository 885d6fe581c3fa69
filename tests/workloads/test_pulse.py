"""The pulse of every recipe: a tiny model takes two steps and is evaluated, through Ray Train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import elastrata
from elastrata.driver.result import TrainResult
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import available_recipes
from support.synthetic import write_data_set

TINY = {
    "workload.hidden_size": 32,
    "workload.num_layers": 2,
    "workload.num_heads": 2,
    "steps": 2,
    "batch_size": 8,
    "schedule.warmup_steps": 1,
    "optimizer.lr": 1e-3,
    "evaluation.samples": 16,
    "micro_batch_tokens": 8192,
    "compile": False,
    "parallel.tensor": 1,
    "parallel.sequence": False,
    "parallel.pipeline": 1,
    "parallel.virtual_stages": 1,
    "parallel.schedule": "1f1b",
    "parallel.micro_batches": None,
    "workers": {"min": 1, "cpus": 0.4, "threads": 1, "spares": False},
}
"""What makes any recipe small; all else is the recipe's own."""
MOST_WORKERS = 2
_OF_PHASES = ("steps", "batch_size", "batch_size_warmup", "schedule.warmup_steps", "data.path")
_TEXT = {"data": {"prepare"}, "phases": {"__all__": {"data": {"prepare"}}}}


def _small(name: str, data: Path, storage: Path) -> Recipe:
    """The recipe, made small, on the data set of its kind in the folder `data`."""
    plain = load_recipe(name)
    prepare = plain.parts[0].data.prepare
    assert prepare is not None
    changes = {
        **TINY,
        "batch_size_warmup": None,
        "begin_with": None,
        "workers.max": MOST_WORKERS
        if plain.workers.max == "auto"
        else min(plain.workers.max, MOST_WORKERS),
        "data.path": str(data / ("pairs" if prepare.pairs else "texts")),
        "storage": str(storage),
    }
    phases = {
        f"phases.{number}.{key}": changes[key]
        for number in range(len(plain.phases))
        for key in _OF_PHASES
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**changes, **phases}.items()]
    return load_recipe(name, overrides)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, pairs in (("texts", False), ("pairs", True)):
        write_data_set(folder / name, samples=60, pairs=pairs, held_out=20)
    return folder


@pytest.fixture(scope="module")
def results() -> dict[str, TrainResult]:
    """By all of a recipe but its name and its text: many, made small, differ in these alone."""
    return {}


@pytest.mark.matrix  # a run for each recipe
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("name", sorted(available_recipes()))
def test_two_steps(name: str, data: Path, results: dict[str, TrainResult], tmp_path: Path) -> None:
    recipe = _small(name, data, tmp_path)
    rest = recipe.model_copy(update={"name": None, "storage": ""}).model_dump_json(exclude=_TEXT)
    if rest not in results:
        results[rest] = elastrata.train(recipe)
    result, steps = results[rest], 2 * len(recipe.parts)
    assert (result.status, result.steps, result.samples_seen) == ("FINISHED", steps, 8 * steps)
    assert (result.target is None) == (recipe.target is None)
    assert result.target is None or (result.target.value is not None and not result.target.reached)
