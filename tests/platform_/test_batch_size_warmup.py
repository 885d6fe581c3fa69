"""Batch-size warm-up: sizes as a function of the step, seeking, and runs at any size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrata.recipe.recipe import Recipe
from elastrata.run.audit import expectation
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.groups import BatchSizeWarmup, batch_size_at
from elastrata_pipelines.storage import Storage
from support.bare_loop import train_on_ranks
from support.ranks import run_ranks
from support.synthetic import tiny_recipe, write_data_set

WARMUP = {"start": 5, "steps": 6, "multiple": 4}
SIZES = [5, 5, 9, 13, 13, 17, 21, 21]
"""Of eight steps with a `batch_size` of 21."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    return folder


@pytest.fixture(scope="module")
def recipe(data: Path) -> dict[str, object]:
    return tiny_recipe(data, data / "runs", steps=8, batch_size_warmup=WARMUP)


@pytest.fixture(scope="module")
def batches(recipe: dict[str, object]) -> Batches:
    return find_training_data(Recipe.model_validate(recipe)).train


@given(st.integers(1, 50), st.integers(1, 100), st.integers(1, 20), st.integers(1, 100))
def test_sizes_grow_by_multiples_from_start_to_full(
    start: int, steps: int, multiple: int, more: int
) -> None:
    warmup, full = BatchSizeWarmup(start=start, steps=steps, multiple=multiple), start + more
    sizes = [batch_size_at(step, full=full, warmup=warmup) for step in range(steps + 2)]
    assert sizes[0] == start
    assert sizes[steps:] == [full, full]
    assert sizes == sorted(sizes)
    assert all((size - start) % multiple == 0 and size < full for size in sizes[:steps])


@settings(deadline=None)
@given(first=st.integers(0, 40), steps=st.integers(1, 30), max_tokens=st.integers(1, 5000))
def test_groups_have_every_step_at_its_position_from_wherever_they_start(
    batches: Batches, first: int, steps: int, max_tokens: int
) -> None:
    warmup = BatchSizeWarmup(start=3, steps=steps, multiple=2)
    sizes = [batch_size_at(step, full=21, warmup=warmup) for step in range(40)]
    start = Start(step=first, samples=sum(sizes[:first]))
    groups = batches.groups(start, steps=40, batch_size=21, max_tokens=max_tokens, warmup=warmup)
    found = [
        (group.first_step + k, group.first_position + k * group.batch_size, group.batch_size)
        for group in groups
        for k in range(group.num_steps)
    ]
    assert found == [(step, sum(sizes[:step]), sizes[step]) for step in range(first, 40)]


def test_the_samples_are_those_of_the_order_at_any_number_of_ranks(data, recipe) -> None:
    storage = Storage(str(data))
    train = find_training_data(Recipe.model_validate(recipe)).train
    expected = expectation(
        storage, train.manifest, seed=train.order.seed, window_stripes=train.order.window_stripes
    )
    digests = [expected.digest_of(sum(SIZES[:k]), SIZES[k]) for k in range(8)]
    alone = run_ranks(1, train_on_ranks, recipe)[0]
    for records in (alone, run_ranks(3, train_on_ranks, recipe)[0]):
        assert [r.digest for r in records] == digests
        assert [r.batch_samples for r in records] == SIZES
        assert [r.loss for r in records] == pytest.approx([r.loss for r in alone], rel=1e-5)
