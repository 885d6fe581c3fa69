"""The promise: ranks in lockstep at any world size, on the lengths of Wikipedia."""

from __future__ import annotations

import numpy as np
import pytest

from elastrata_pipelines.balance import draw_batches
from elastrata_pipelines.baselines import compare
from elastrata_pipelines.deal import WorkModel, deal
from support.wikipedia import histogram

WORK = WorkModel(linear=24 * 1024**2, quadratic=4 * 1024)
WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 31, 48, 64, 97, 127, 251, 509, 777, 1000, 1021, 1024]
BUDGET = 8192


def _imbalances(workers: int, batch_size: int) -> list[float]:
    """Of some hundreds of ranks in all, so that the mean of few ranks is one of many steps."""
    steps = max(3, 400 // workers)
    return [
        deal(lengths, num_ranks=workers, work=WORK, tokens_per_micro_batch=BUDGET).imbalance
        for lengths in draw_batches(histogram(), batch_size=batch_size, steps=steps)
    ]


def test_1024_workers_with_16_samples_each_balance_to_two_thousandths() -> None:
    assert max(_imbalances(1024, 16 * 1024)) <= 1.002


@pytest.mark.parametrize("workers", WORLD_SIZES)
def test_any_world_size_with_8_samples_each_balances_to_a_hundredth(workers: int) -> None:
    for batch_size in (8 * workers, 8 * workers + workers // 3, 11 * workers + 1, 16 * workers):
        assert np.mean(_imbalances(workers, batch_size)) <= 1.01


def test_no_other_scheme_comes_near() -> None:
    found = compare(
        draw_batches(histogram(), batch_size=16 * 256, steps=4),
        workers=256,
        tokens_per_micro_batch=BUDGET,
        work=WORK,
        seq_len=512,
        ranks_per_node=8,
    )
    excess = {scheme.scheme: scheme.imbalance_max_over_mean - 1 for scheme in found}
    assert next(iter(excess)) == "deal"
    assert all(2 * excess["deal"] < value for name, value in excess.items() if name != "deal")
    assert excess["sorted_to_and_fro"] < excess["exchanged_in_nodes"] < excess["stratified"]
    assert excess["stratified"] < excess["sorted_round_robin"] < excess["random"]
