"""A loss that is not a number: the run stops and says so, or leaves the batch out."""

from __future__ import annotations

import math

import pytest

from elastrata.step.events import TrainingError
from support.poison import train_aborted, train_poisoned
from support.ranks import run_ranks
from support.synthetic import tiny_recipe, write_data_set

STEPS = 8


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    return tiny_recipe(folder, folder / "runs", steps=STEPS)


@pytest.mark.parametrize("world_size", [1, 3])
def test_skipped_batches_change_nothing_and_are_marked(world_size, recipe) -> None:
    ranks = run_ranks(world_size, train_poisoned, {**recipe, "on_nonfinite": "skip"})
    records = ranks[0]
    skipped = [record.step for record in records if record.skipped]
    assert 0 < len(skipped) < STEPS
    assert [r.step for r in records] == list(range(1, STEPS + 1))
    assert [math.isnan(r.loss) for r in records] == [r.skipped for r in records]
    good = [record.loss for record in records if not record.skipped]
    assert good[-1] < good[0], "it goes on to learn, so no weight was harmed"
    for other in ranks[1:]:
        assert [r.step for r in other if r.skipped] == skipped


def test_the_default_stops_with_a_clear_report(recipe) -> None:
    records = run_ranks(1, train_poisoned, {**recipe, "on_nonfinite": "skip"})[0]
    first = next(record.step for record in records if record.skipped)
    with pytest.raises(TrainingError, match=rf"step {first}: loss nan .*on_nonfinite=skip"):
        run_ranks(1, train_poisoned, recipe)


def test_what_an_aborted_collective_leaves_is_a_peers_failure_not_a_loss(recipe) -> None:
    """A TrainingError would end the run for good."""
    assert run_ranks(1, train_aborted, recipe) == ["AbortedError"]
