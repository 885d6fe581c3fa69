"""Lengths in epochs or tokens, and `workers.max: auto`: numbers found when the run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrata.driver.launch import MOST_EPOCHS, find_repetition, with_workers
from elastrata.recipe.data_sets import resolve_steps
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.step.schedule import ScheduleConfig, learning_rate
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.groups import BatchSizeWarmup, count_samples, count_steps_for
from support.synthetic import tiny_recipe, write_data_set

SAMPLES = 150


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("data")
    return folder, write_data_set(folder, samples=SAMPLES)


def _recipe(folder: Path, **keys: object) -> Recipe:
    values = tiny_recipe(folder, folder / "runs", **keys)
    if keys.keys() & {"epochs", "tokens"}:
        del values["steps"]
    return Recipe.model_validate(values)


def test_epochs_and_tokens_become_steps(data: tuple[Path, Manifest]) -> None:
    folder, manifest = data
    by_epochs = resolve_steps(_recipe(folder, epochs=2, batch_size=16))
    assert (by_epochs.steps, by_epochs.epochs) == (19, None)  # 300 samples in batches of 16
    by_tokens = resolve_steps(_recipe(folder, tokens=manifest.tokens, batch_size=16))
    assert (by_tokens.steps_in_all, by_tokens.tokens) == (10, None)
    given_steps = _recipe(folder, steps=7)
    assert resolve_steps(given_steps) is given_steps


def test_every_phase_has_a_length_of_its_own(data: tuple[Path, Manifest]) -> None:
    recipe = _recipe(data[0], steps=4, batch_size=10, phases=[{"epochs": 1}, {}])
    assert [part.steps for part in recipe.parts] == [None, 4]
    assert [part.steps for part in resolve_steps(recipe).parts] == [15, 4]


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 60), st.integers(0, 40), st.integers(1, 20))
def test_steps_for_are_the_fewest_that_have_the_samples(
    samples: int, full: int, warming: int, start: int
) -> None:
    warmup = (
        BatchSizeWarmup(start=min(start, full - 1), steps=warming) if warming and full > 1 else None
    )
    steps = count_steps_for(samples, full=full, warmup=warmup)
    least = warmup.steps + 1 if warmup else 1
    assert steps == least or count_samples(steps - 1, full=full, warmup=warmup) < samples
    assert steps >= least
    assert count_samples(steps, full=full, warmup=warmup) >= samples


def test_steps_of_data_that_is_not_there_are_asked_for_in_vain(tmp_path: Path) -> None:
    recipe = resolve_steps(_recipe(tmp_path, epochs=3))
    with pytest.raises(UserError, match=r"epochs: 3\.0: the number of steps depends on"):
        _ = recipe.steps_in_all


def test_a_length_replaces_the_one_it_inherits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: tuple[Path, Manifest]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = tiny_recipe(data[0], tmp_path / "runs", steps=9) | {"schedule": {"warmup_steps": 2}}
    Path("base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    Path("mine.yaml").write_text(
        "extends: base.yaml\nepochs: 2\nschedule: {warmup_ratio: 0.5}\n", encoding="utf-8"
    )
    recipe = load_recipe("mine.yaml")
    assert (recipe.steps, recipe.epochs) == (None, 2)
    assert (recipe.schedule.warmup_steps, recipe.schedule.warmup_ratio) == (0, 0.5)
    again = load_recipe("mine.yaml", ["steps=8", "schedule.warmup_steps=1"])
    assert (again.steps, again.epochs, again.schedule.warmup_ratio) == (8, None, None)


def test_two_lengths_in_one_place_are_one_too_many(data: tuple[Path, Manifest]) -> None:
    folder = data[0]
    values = tiny_recipe(folder, folder / "runs", steps=5) | {"epochs": 2, "name": "two"}
    (folder / "two.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(UserError, match=r"epochs: 2\.0: not allowed with steps") as raised:
        load_recipe(str(folder / "two.yaml"))
    assert len(raised.value.problems) == 1


def test_a_warm_up_may_be_a_share_of_the_steps() -> None:
    share, steps = ScheduleConfig(warmup_ratio=0.1), ScheduleConfig(warmup_steps=20)
    for step in range(200):
        rates = [learning_rate(one, peak=1.0, step=step, steps=200) for one in (share, steps)]
        assert rates[0] == rates[1]
    assert ScheduleConfig(warmup_ratio=0.9).warmup(1) == 0
    with pytest.raises(ValueError, match="not allowed with warmup_steps"):
        ScheduleConfig(warmup_ratio=0.1, warmup_steps=5)


def test_data_that_is_learned_by_heart_is_told(data: tuple[Path, Manifest]) -> None:
    folder = data[0]
    for epochs, is_told in ((MOST_EPOCHS, False), (MOST_EPOCHS + 5, True)):
        recipe = resolve_steps(_recipe(folder, epochs=epochs, batch_size=SAMPLES))
        line = find_repetition(recipe, find_training_data(recipe))
        assert (line is not None) == is_told
    assert line is not None
    assert line.startswith("45 steps go 45 times through the 150 samples of")


@pytest.mark.parametrize(
    ("resources", "gpus", "expected"),
    [
        ({"CPU": 2.0}, 0.0, 1),
        ({"CPU": 16.0}, 0.0, 8),
        ({"CPU": 1.0}, 0.0, 1),
        ({"CPU": 16.0, "GPU": 4.0}, 1.0, 4),
        ({"CPU": 900.0, "GPU": 100.0}, 1.0, 16),
    ],
)
def test_auto_takes_what_the_cluster_has_room_for(
    data: tuple[Path, Manifest], resources: dict[str, float], gpus: float, expected: int
) -> None:
    recipe = _recipe(data[0], steps=3, batch_size=16, workers={"max": "auto"})
    assert recipe.workers.most == 1
    assert with_workers(recipe, gpus, resources).workers.max == expected


def test_auto_comes_in_whole_groups(data: tuple[Path, Manifest]) -> None:
    keys = {"workers": {"min": 2, "max": "auto"}, "parallel": {"tensor": 2}}
    recipe = _recipe(data[0], steps=3, batch_size=16, **keys)
    assert with_workers(recipe, 1.0, {"GPU": 7.0}).workers.max == 6
