"""`bench data`, `bench balance` and `bench reduce`: what they count is what there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastrata.bench.balance import measure_balances
from elastrata.bench.input import read_here, read_through_ray
from elastrata.bench.reduction import bucket_sizes, measure_reduction
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.inspection import inspect
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe, write_data_set

WARM_UP, STEPS, BATCH = 3, 40, 21


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    return Recipe.model_validate(tiny_recipe(folder, folder / "runs"))


def real_tokens(batches: Batches) -> int:
    """In the steps that count."""
    lengths = batches.manifest.read_lengths(Storage(batches.url))
    places = batches.order.places(WARM_UP * BATCH, STEPS * BATCH)
    return int(lengths[places.stripes * batches.order.stripe_size + places.rows].sum())


def test_this_process_reads_the_steps_of_a_run(recipe: Recipe) -> None:
    batches = training_data(recipe).train
    found = read_here(batches, batch_size=BATCH, steps=STEPS, warm_up=WARM_UP)
    assert (found.workers, found.through) == (1, "this process")
    assert (found.steps, found.samples) == (STEPS, STEPS * BATCH)
    assert found.tokens == real_tokens(batches)
    assert found.tokens_per_second == pytest.approx(found.tokens / found.seconds)
    assert found.seconds_to_first_batch > 0


def test_workers_get_the_same_through_ray(recipe: Recipe, ray_local: None) -> None:
    batches = training_data(recipe).train
    found = read_through_ray(batches, workers=2, batch_size=BATCH, steps=STEPS, warm_up=WARM_UP)
    assert (found.workers, found.through, found.steps) == (2, "Ray Data", STEPS)
    assert (found.samples, found.tokens) == (STEPS * BATCH, real_tokens(batches))


def test_the_balance_is_the_one_inspect_shows(recipe: Recipe) -> None:
    batches = training_data(recipe).train
    found = measure_balances(recipe, "data", [2, 5], samples_per_worker=7)
    for workers, balance in found.items():
        shown = inspect(
            Storage(batches.url),
            workers=workers,
            batch_size=7 * workers,
            tokens_per_micro_batch=recipe.micro_batch_tokens,
            work=batches.work,
            window_stripes=recipe.data.window_stripes,
            seed=recipe.seed,
        )
        assert balance == shown.balance


def test_samples_of_one_length_are_dealt_evenly(recipe: Recipe) -> None:
    (balance,) = measure_balances(recipe, "full", [16], samples_per_worker=3).values()
    assert balance.imbalance_worst == 1.0


def test_buckets_are_the_blocks_and_the_rest(recipe: Recipe) -> None:
    manifest = training_data(recipe).train.manifest
    model = recipe.workload.build_model(manifest.vocabulary, manifest.seq_len)
    first, second, rest = bucket_sizes(recipe)
    assert first == second
    assert first + second + rest == sum(p.numel() for p in model.parameters())


@pytest.mark.matrix
@pytest.mark.parametrize("gathered", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_reduction(gathered: torch.dtype) -> None:
    numbers = 3_000 + 1_001  # which two processes cannot share evenly
    found = measure_reduction([3_000, 1_001], processes=2, gathered=gathered, rounds=4, warm_up=1)
    assert (found.processes, found.buckets, found.parameters) == (2, 2, numbers)
    by_name: dict[str, Any] = {one.collective: one for one in found.collectives}
    assert {name: one.bytes for name, one in by_name.items()} == {
        "all_reduce": 4 * numbers,
        "reduce_scatter": 4 * numbers,
        "all_gather": gathered.itemsize * numbers,
    }
    for name, one in by_name.items():
        # of two processes each sends half of it, twice for an all-reduce
        sent = one.bytes * (1 if name == "all_reduce" else 0.5)
        assert one.gigabytes_per_second == pytest.approx(sent / one.seconds.median / 1e9)
    assert found.seconds_scattered.lower >= by_name["all_gather"].seconds.lower
