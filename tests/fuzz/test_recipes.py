"""Hostile recipes: each is refused in lines that name file and key, or is sound to the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from elastrata.driver.model_inspection import inspect_model
from elastrata.planner.cluster import read_cluster
from elastrata.planner.plan import plan
from elastrata.recipe.data_sets import preparations
from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import available_recipes
from elastrata.trainer.preflight import find_training_data, mask_problems
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.groups import count_samples
from support.hostile_recipes import (
    RECIPE,
    Hostile,
    bomb,
    hostile_recipes,
    write_neighbours,
)
from support.mutations import quick, seeds
from support.verdict import hangs_are_errors

CASES = 50
CHUNKS = quick(16) * len(seeds())
MOST_CHARACTERS = 4_000
MOST_LINES = 200
MOST_BLOCKS = 100
"""Of a model that is built here, without its numbers: more take seconds."""
NEIGHBOURS = ("itself", "empty", "latin", "large", "folder", "pipe", "circle", "zero", "sound", "/")
BREAKING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_neighbours(tmp_path)
    return tmp_path


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_hostile_recipe_is_refused_in_lines_or_sound(folder: Path, chunk: int) -> None:
    outcomes = [_outcome(folder, case) for case in hostile_recipes(chunk, CASES)]
    assert not all(outcomes), "all are sound: nothing is tried"
    # A later chunk may happen to have none that is sound.
    assert chunk or any(outcomes), "none is sound: nothing is tried"


def _outcome(folder: Path, case: Hostile) -> bool:
    """Whether a case loads; all that must hold of it does."""
    (folder / RECIPE).write_bytes(case.text)
    try:
        with hangs_are_errors():
            return _loads(folder, case)
    except Exception as error:
        told = f"{type(error).__name__}: {error}\n{case.name[:99]} {str(case.overrides)[:999]}\n"
        raise AssertionError(told + case.text.decode("utf-8", "replace")[:4000]) from error


def _loads(folder: Path, case: Hostile) -> bool:
    try:
        recipe = load_recipe(case.name, case.overrides)
    except UserError as error:
        _check_lines(error.problems)
        _check_files(error.problems, case)
        return False
    (folder / "again.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe("again.yaml") == recipe
    for check in (_numbers, mask_problems, preparations, find_training_data, _plan, _inspect):
        try:
            check(recipe)
        except UserError as error:
            _check_lines(error.problems)
    return True


def _numbers(recipe: Recipe) -> None:
    for part in (part for part in recipe.parts if part.steps is not None):
        count_samples(part.steps, full=part.batch_size, warmup=part.batch_size_warmup)
    for step in (0, recipe.steps_in_all // 2, recipe.steps_in_all - 1):
        assert 0 <= recipe.learning_rate(step) < float("inf")


def _plan(recipe: Recipe) -> None:
    plan(recipe, recipe.parts[0], read_cluster("1xA100-80GB"))


def _inspect(recipe: Recipe) -> None:
    if getattr(recipe.workload, "num_layers", 0) <= MOST_BLOCKS:
        inspect_model(recipe)


def _check_lines(lines: Sequence[str]) -> None:
    assert lines
    assert len(lines) == len(set(lines)) <= MOST_LINES, lines
    for line in lines:
        assert ": " in line
        assert len(line) <= MOST_CHARACTERS
        assert not BREAKING.search(line), line


def _check_files(lines: Sequence[str], case: Hostile) -> None:
    """Each line begins with the file that it is about, or with the command line."""
    (called,) = UserError(case.name).problems
    files = (called[:9], "command line", *_shipped(), "chain-", *NEIGHBOURS)
    assert all(line.startswith(files) for line in lines), lines


_shipped = lru_cache(available_recipes)


@pytest.mark.parametrize("kind", ["list", "map", "merge"])
@pytest.mark.parametrize(("levels", "width"), [(10, 10), (40, 10), (5, 100)])
def test_a_bomb_of_anchors_is_refused_before_it_goes_off(
    folder: Path, kind: str, levels: int, width: int
) -> None:
    (folder / RECIPE).write_text(bomb(levels, width, kind), encoding="utf-8")
    with hangs_are_errors(), pytest.raises(UserError) as raised:
        load_recipe(RECIPE)
    (line,) = raised.value.problems
    assert re.fullmatch(rf"{RECIPE}:\d+: more than 50,000 values, .*", line)
