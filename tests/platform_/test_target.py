"""The target: when it is reached, when the run is evaluated, and what a history says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastrata.checkpoints.commit import Commit
from elastrata.cli.main import run
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import RECIPE_FILE
from elastrata.run.goodput import TimeToTarget, time_to_target
from elastrata.run.ownership import Driver
from elastrata.run.status import Status, summary
from elastrata.step.evaluate import EvaluationConfig, evaluation_due
from elastrata.step.target import TargetConfig, is_over, is_reached
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.groups import BatchSizeWarmup, batch_size_at
from support.histories import BATCH, Entry, said, started, stepped, write_run
from support.synthetic import tiny_recipe, write_data_set

ACCURACY = TargetConfig(metric="eval/mlm_accuracy", at_least=0.72)
LOSS = TargetConfig(metric="eval/loss", at_most=1.5)
BEGAN = 1_700_000_000.0


@pytest.mark.parametrize(
    ("target", "metrics", "expected"),
    [
        (ACCURACY, {"eval/mlm_accuracy": 0.72}, True),
        (ACCURACY, {"eval/mlm_accuracy": 0.7199}, False),
        (ACCURACY, {"eval/loss": 0.9}, False),
        (ACCURACY, {}, False),
        (LOSS, {"eval/loss": 1.5}, True),
        (LOSS, {"eval/loss": 1.6}, False),
        (LOSS, {"eval/loss": math.nan}, False),
        (TargetConfig(metric="eval/loss", at_least=1), {"eval/loss": math.inf}, False),
        (None, {"eval/loss": 0.0}, False),
    ],
)
def test_when_it_is_reached(
    target: TargetConfig | None, metrics: dict[str, float], expected: bool
) -> None:
    assert is_reached(target, metrics) is expected
    assert is_over(3, metrics, steps=9, target=target) is expected
    assert is_over(9, metrics, steps=9, target=target)


@pytest.mark.parametrize("bounds", [{}, {"at_least": 1, "at_most": 2}, {"at_least": math.nan}])
def test_a_target_has_one_bound(bounds: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        TargetConfig(metric="eval/loss", **bounds)


@given(
    every_samples=st.integers(1, 300),
    steps=st.integers(1, 60),
    start=st.integers(1, 20),
    more=st.integers(1, 50),
    warmup_steps=st.integers(1, 60),
)
def test_it_is_evaluated_after_the_first_step_that_reaches_a_multiple(
    every_samples: int, steps: int, start: int, more: int, warmup_steps: int
) -> None:
    config = EvaluationConfig(every_samples=every_samples)
    warmup = BatchSizeWarmup(start=start, steps=warmup_steps)
    samples, found, expected, multiple = 0, [], [], every_samples
    for step in range(1, steps + 1):
        batch = batch_size_at(step - 1, full=start + more, warmup=warmup)
        samples += batch
        if evaluation_due(config, step=step, steps=steps, samples=samples, batch_samples=batch):
            found.append(step)
        if samples >= multiple or step == steps:
            expected.append(step)
        while multiple <= samples:
            multiple += every_samples
    assert found == expected


def test_it_is_evaluated_every_so_many_steps_and_after_the_last() -> None:
    config = EvaluationConfig(every=4)
    due = [
        evaluation_due(config, step=k, steps=10, samples=7 * k, batch_samples=7)
        for k in range(1, 11)
    ]
    assert [k for k, is_due in enumerate(due, 1) if is_due] == [4, 8, 10]


def test_samples_take_the_place_of_steps() -> None:
    assert EvaluationConfig().every == 250
    by_samples = EvaluationConfig(every_samples=9)
    assert (by_samples.every, by_samples.every_samples) == (None, 9)
    assert EvaluationConfig.model_validate(by_samples.model_dump()) == by_samples
    for wrong in ({"every": 3, "every_samples": 9}, {"every": None}):
        with pytest.raises(ValidationError, match="either every"):
            EvaluationConfig.model_validate(wrong)


def _evaluated(attempt: int, step: int, accuracy: float, *, time: float) -> Entry:
    metrics = {"eval/loss": 2.0, "eval/mlm_accuracy": accuracy}
    return said("evaluated", attempt, time=time, step=step, **metrics)


def _steps(attempt: int, first: int, last: int, *, time: float) -> list[Entry]:
    return [stepped(attempt, n, time=time + n - first) for n in range(first, last + 1)]


def _resumed() -> list[Entry]:
    """The target is reached at step 4, but that group is lost and goes back behind it; the next
    one reaches it at step 6."""
    return [
        started(1, 0, time=BEGAN),
        *_steps(1, 1, 4, time=BEGAN + 1),
        _evaluated(1, 4, 0.73, time=BEGAN + 5),
        started(2, 2, time=BEGAN + 20),
        *_steps(2, 3, 4, time=BEGAN + 21),
        _evaluated(2, 4, 0.71, time=BEGAN + 24),
        *_steps(2, 5, 6, time=BEGAN + 25),
        _evaluated(2, 6, 0.7213, time=BEGAN + 27.5),
    ]


def test_the_time_to_target_is_that_of_the_steps_that_count() -> None:
    outcome = time_to_target(_resumed(), ACCURACY)
    assert outcome == TimeToTarget(
        metric="eval/mlm_accuracy",
        at_least=0.72,
        at_most=None,
        reached=True,
        value=0.7213,
        step=6,
        samples=6 * BATCH,
        tokens=600,
        seconds=27.5,
        seconds_in_steps=6.0,
    )
    assert str(outcome) == (
        "reached: eval/mlm_accuracy 0.7213 >= 0.72 at step 6, 126 samples, 600 tokens, "
        "after 27.5 s of training (6.0 s in steps)"
    )
    assert outcome.to_metrics() == {
        "target/step": 6,
        "target/samples": 126,
        "target/tokens": 600,
        "target/seconds": 27.5,
        "target/seconds_in_steps": 6.0,
    }


def test_a_target_that_is_not_reached_says_how_far_it_is() -> None:
    outcome = time_to_target(_resumed()[:-1], ACCURACY)
    assert str(outcome) == "not reached: eval/mlm_accuracy 0.71, expected >= 0.72"
    assert outcome.to_metrics() == {}
    none = time_to_target(_resumed()[:2], LOSS)
    assert str(none) == "not reached: eval/loss no evaluation yet, expected <= 1.5"
    diverged = time_to_target([_evaluated(1, 1, math.nan, time=BEGAN)], ACCURACY)
    assert diverged.value is None, "JSON knows no NaN"


def _summary(entries: list[Entry], target: TargetConfig | None) -> Status:
    return summary(
        "runs/one",
        entries,
        steps_in_all=40,
        target=target,
        checkpoint=None,
        driver=Driver(alive=False),
        now=BEGAN + 60,
    )


def test_a_run_that_reached_its_target_is_finished() -> None:
    found = _summary(_resumed(), ACCURACY)
    assert (found.state, found.steps, found.steps_in_all) == ("finished", 6, 40)
    assert found.target == time_to_target(_resumed(), ACCURACY)
    further = [*_resumed(), started(3, 6, time=BEGAN + 40), stepped(3, 7, time=BEGAN + 41)]
    assert _summary(further, ACCURACY).state == "silent", "it went on, with another target then"
    assert _summary(_resumed(), None).target is None


def test_status_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = {"metric": "eval/mlm_accuracy", "at_least": 0.72}
    write_run(tmp_path / "one", _resumed(), steps=40, target=target)
    assert run(["status", str(tmp_path / "one")]) == 0
    assert "target      reached: eval/mlm_accuracy 0.7213 >= 0.72" in capsys.readouterr().out
    assert run(["status", str(tmp_path / "one"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["target"]["reached"], shown["target"]["step"]) == (True, 6)
    recipe = tmp_path / "one" / RECIPE_FILE
    recipe.write_text(
        recipe.read_text(encoding="utf-8").replace("at_least: 0.72", "at_least: much"),
        encoding="utf-8",
    )
    assert run(["status", str(tmp_path / "one")]) == 2
    assert (
        "damaged: ValidationError: 1 validation error for TargetConfig" in capsys.readouterr().err
    )


def test_a_commit_tells_what_its_step_was_evaluated_at() -> None:
    def commit(extra: dict[str, Any]) -> Commit:
        values = {"step": 1, "samples": 1, "tokens": 1, "extra": extra, "files": {}}
        made = Commit(folder="000000001-0001-aaaaaa", **values)
        return Commit.from_json(made.to_json(), made.folder)

    diverged = {"evaluation": {"eval/loss": math.nan, "eval/mlm_accuracy": 0.5}}
    assert commit(diverged).evaluation == {"eval/mlm_accuracy": 0.5}
    assert commit({}).evaluation == {}


def test_a_target_needs_held_out_data(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=60)
    target = {"metric": "eval/mlm_accuracy", "at_least": 0.72}
    recipe = Recipe.model_validate(tiny_recipe(tmp_path / "data", "runs", target=target))
    with pytest.raises(UserError) as caught:
        find_training_data(recipe)
    assert caught.value.problems == (
        "target.metric: eval/mlm_accuracy: needs held-out data, but there is none in "
        f"{tmp_path}/data/held_out; prepare with data.prepare.held_out, or give evaluation.path",
    )
    write_data_set(tmp_path / "data", samples=60, held_out=20)
    assert find_training_data(recipe).held_out is not None
