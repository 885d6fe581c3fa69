"""The average of the weights: what it is, that it changes nothing else, and who can have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elastrata.checkpoints.commit import Commit, list_commits
from elastrata.checkpoints.state import ModelTensors
from elastrata.cli.main import run as run_here
from elastrata.inference.evaluation import evaluate_run
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.run import history
from elastrata.run.weights import read_weights
from elastrata.step.average import AVERAGE, AverageConfig, WeightAverage
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.average_ranks import averaged_on_ranks, restored_on_ranks
from support.lone_run import lone_run
from support.ranks import run_ranks
from support.synthetic import tiny_recipe

EVERY_STEP: dict[str, Any] = {
    "checkpoint": {"every": 1, "keep_last": 9},
    "evaluation": {"every": 1, "samples": 32},
}
CLOSE = 1e-6
"""fp32 sums in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("average")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return lone_run(folder, "plain", **EVERY_STEP)


@pytest.fixture(scope="module")
def averaging(folder: Path) -> Path:
    config = {"decay": 0.3, "evaluated": True}
    return lone_run(folder, "averaging", **EVERY_STEP, average=config)


def commit_of(run: Path, step: int) -> Commit:
    found = list_commits(Storage(str(run)).sub("checkpoints"))
    return next(commit for commit in found if commit.step == step)


def weights(run: Path, step: int, wanted: str = "trained") -> dict[str, Tensor]:
    return dict(read_weights(Storage(str(run)), commit_of(run, step), wanted))


def evaluations(run: Path) -> list[Any]:
    entries = history.read_entries(Storage(str(run)).sub("history"))
    return [entry["eval/loss"] for entry in history.surviving_evaluations(entries)]


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=CLOSE, atol=CLOSE)


def lerp(kept: float, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: kept * old[name] + (1 - kept) * new[name] for name in old}


def test_tied_weights_have_one_average_and_what_is_no_number_has_none() -> None:
    weight = torch.ones(2)
    weights = {"embedding": weight, "head": weight.detach(), "position": torch.tensor([3])}
    average = WeightAverage(AverageConfig(decay=0.5), weights)
    average.begin()
    weight.fill_(3.0)
    average.stepped(1000)
    state = average.state()[AVERAGE]
    assert list(state) == ["embedding", "head"]
    assert state["embedding"] is state["head"]
    assert state["head"].tolist() == [2.0, 2.0]
    with average.swap_in():
        assert weight.tolist() == [2.0, 2.0]
    assert weight.tolist() == [3.0, 3.0]


def test_every_step_comes_in_and_training_stays_as_it_is(plain: Path, averaging: Path) -> None:
    for step in (2, 3, 4):
        kept = min(0.3, (1 + step) / (10 + step))
        before, new = weights(averaging, step - 1, "average"), weights(averaging, step)
        close(weights(averaging, step, "average"), lerp(kept, before, new))
        trained = weights(plain, step)
        assert all(torch.equal(new[name], trained[name]) for name in trained)


def test_without_it_checkpoints_are_what_they_were(plain: Path) -> None:
    checkpoints = Storage(str(plain)).sub("checkpoints")
    assert not ModelTensors(checkpoints, commit_of(plain, 4), AVERAGE)
    with pytest.raises(UserError, match="has none: expected a run whose recipe has the section"):
        weights(plain, 4, "average")


def test_a_run_that_had_none_begins_one_where_it_goes_on(folder: Path) -> None:
    lone_run(folder, "later", **EVERY_STEP, steps=2)
    run = lone_run(folder, "later", **EVERY_STEP, average={"decay": 0.2})
    expected = lerp(0.2, weights(run, 2), weights(run, 3))
    close(weights(run, 3, "average"), expected)
    close(weights(run, 4, "average"), lerp(0.2, expected, weights(run, 4)))


def test_evaluations_are_of_what_is_chosen(plain: Path, averaging: Path) -> None:
    told = evaluations(averaging)[-1]
    assert evaluate_run(str(averaging))["eval/loss"] == pytest.approx(told, rel=CLOSE)
    again = evaluate_run(str(averaging), weights="average")["eval/loss"]
    assert again == pytest.approx(told, rel=CLOSE)
    trained = evaluate_run(str(averaging), weights="trained")["eval/loss"]
    assert trained == pytest.approx(evaluations(plain)[-1], rel=CLOSE)
    assert trained != pytest.approx(told, rel=1e-4)


def test_a_mean_is_that_of_the_last_checkpoints(plain: Path) -> None:
    three = [weights(plain, step) for step in (1, 2, 3)]
    expected = {name: sum(one[name].double() for one in three) / 3 for name in three[0]}
    found = weights(plain, 3, "mean:3")
    close(found, {name: value.float() for name, value in expected.items()})
    assert evaluate_run(str(plain), "3", "mean:1") == evaluate_run(str(plain), "3", "trained")


@pytest.mark.parametrize("choice", ["average", "mean:2"])
def test_an_export_has_the_weights_that_are_chosen(
    choice: str, averaging: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    assert run_here(["export", str(averaging), "--out", str(out), "--weights", choice]) == 0
    name = "bert.encoder.layer.0.attention.self.query.weight"
    exported = load_file(out / "model.safetensors")[name]
    assert torch.equal(exported, weights(averaging, 4, choice)[name])
    assert not torch.equal(exported, weights(averaging, 4)[name])


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        ("averag", "--weights: averag: expected trained, average, or the mean of checkpoints, such "
         "as mean:5 (did you mean 'average'?)"),
        ("mean:0", "--weights: mean:0: expected trained, average"),
        ("mean:5", "--weights: mean:5: expected at most mean:4: up to step 4 there are the "
         "checkpoints of 1, 2, 3, 4; checkpoint.keep_last keeps more"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_told(
    choice: str, line: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(plain), "--out", str(tmp_path / "model"), "--weights", choice]
    assert run_here(command) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(line)
    assert not (tmp_path / "model").exists()


def test_sparse_weights_have_none() -> None:
    sparse = {"method": "static", "level": 0.5}
    recipe = Recipe.model_validate(tiny_recipe("data", "runs", sparsity=sparse, average={}))
    assert [line for _, line in cross_field_problems(recipe)] == [
        "average: not allowed with sparsity, because an average of weights is zero only if all of "
        "them are"
    ]


def test_shards_have_the_average_of_the_whole_and_load_at_other_sizes(tmp_path: Path) -> None:
    (alone, *_) = run_ranks(1, averaged_on_ranks, str(tmp_path / "1"))
    (divided, *_) = run_ranks(2, averaged_on_ranks, str(tmp_path / "2"))
    close(divided, alone)
    for ranks in (1, 3):
        (restored, *_) = run_ranks(ranks, restored_on_ranks, str(tmp_path / "2"))
        assert all(torch.equal(restored[name], divided[name]) for name in divided)
