"""The pulse of every recipe: a tiny model takes two steps and is evaluated, through Ray Train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import elastrata
from elastrata.recipe.file import load_recipe
from elastrata.recipe.yaml_reader import available_recipes
from support.synthetic import write_data_set

TINY = {
    "workload.hidden_size": 32,
    "workload.num_layers": 2,
    "workload.num_heads": 2,
    "steps": 2,
    "batch_size": 8,
    "schedule.warmup_steps": 1,
    "evaluation.samples": 16,
    "micro_batch_tokens": 512,
    "compile": False,
    "workers": {"cpus": 0.4, "threads": 1, "spares": False},
}
"""What makes any recipe small; all else is the recipe's own."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, pairs in (("texts", False), ("pairs", True)):
        write_data_set(folder / name, samples=60, pairs=pairs)
        write_data_set(folder / name / "held_out", samples=20, seed=1, pairs=pairs)
    return folder


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("name", sorted(available_recipes()))
def test_two_steps(name: str, data: Path, tmp_path: Path) -> None:
    plain = load_recipe(name)
    places = {
        "data.path": str(data / ("pairs" if plain.workload.next_sentence else "texts")),
        "storage": str(tmp_path),
    }
    changes = {**TINY, **places}
    phases = {
        f"phases.{number}.{key}": changes[key]
        for number in range(len(plain.phases))
        for key in ("steps", "batch_size", "schedule.warmup_steps", "data.path")
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**changes, **phases}.items()]
    recipe = load_recipe(name, overrides)
    result = elastrata.train(recipe)
    steps = 2 * len(recipe.parts)
    assert (result.status, result.steps, result.samples_seen) == ("FINISHED", steps, 8 * steps)
    assert (result.target is None) == (recipe.target is None)
    assert result.target is None or (result.target.value is not None and not result.target.reached)
