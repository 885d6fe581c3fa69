"""The lone trial: a run like any other, without Ray, continued and copied to the digit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastrata.parallel.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.sweeps.journal import Report
from elastrata.sweeps.trial import LoneTrial
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe, write_data_set

STEPS, EVERY = 12, 4


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    threads = torch.get_num_threads()
    with lone_group(torch.device("cpu")):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=300, held_out=40)
    return folder


def _recipe(data: Path, storage: Path, lr: float = 1e-2) -> Recipe:
    values = tiny_recipe(
        data,
        storage,
        steps=STEPS,
        optimizer={"lr": lr},
        evaluation={"every": EVERY, "samples": 32},
        checkpoint={"every": EVERY},
    )
    return Recipe.model_validate(values)


def _all(trial: LoneTrial) -> list[Report]:
    reports = []
    while not reports or reports[-1].state == "running":
        reports.append(trial.report())
    trial.close()
    return reports


def test_a_trial_that_was_left_goes_on_as_if_it_had_not_been(data: Path, tmp_path: Path) -> None:
    recipe = _recipe(data, tmp_path)
    whole = _all(LoneTrial(recipe, Storage(str(tmp_path / "whole"))))
    assert [report.step for report in whole] == [4, 8, 12]
    assert [len(report.steps) for report in whole] == [4, 4, 4]
    first = LoneTrial(recipe, Storage(str(tmp_path / "parts")))
    begun = [first.report(), first.report()]
    first.close()
    parts = _all(LoneTrial(recipe, Storage(str(tmp_path / "parts")), told=begun[0].step))
    assert [report.step for report in parts] == [8, 12]
    assert [r.metrics for r in (begun[0], *parts)] == [r.metrics for r in whole]
    assert [r.steps for r in parts] == [r.steps for r in whole[1:]]
    steps = history.effective_steps(
        history.read_entries(Storage(str(tmp_path / "parts" / "history")))
    )
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert (parts[-1].state, parts[-1].tokens) == ("finished", whole[-1].tokens)


def test_a_trial_that_was_over_says_so_again_and_trains_nothing(data: Path, tmp_path: Path) -> None:
    recipe, run = _recipe(data, tmp_path), Storage(str(tmp_path / "run"))
    last = _all(LoneTrial(recipe, run))[-1]
    (again,) = _all(LoneTrial(recipe, run, told=STEPS))
    assert again.metrics == last.metrics
    assert (again.state, again.step, again.tokens) == ("finished", STEPS, last.tokens)
    assert again.steps == last.steps


def test_a_copy_has_the_loss_of_the_original_and_its_place_in_the_data(
    data: Path, tmp_path: Path
) -> None:
    original = LoneTrial(_recipe(data, tmp_path), Storage(str(tmp_path / "original")))
    report = original.report()
    folder = original.save()
    copy = LoneTrial(
        _recipe(data, tmp_path, lr=3e-3),
        Storage(str(tmp_path / "copy")),
        (original.run, folder),
    )
    assert copy.evaluation() == report.metrics
    assert (copy.start.step, copy.start.samples, copy.start.tokens) == (
        report.step,
        report.samples,
        report.tokens,
    )
    next_of_copy, next_of_original = copy.report(), original.report()
    copy.close()
    original.close()
    assert next_of_copy.tokens == next_of_original.tokens
    assert next_of_copy.metrics != next_of_original.metrics
