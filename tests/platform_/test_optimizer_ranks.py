"""Optimizers on sharded parameters: the same at any number of ranks, and through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.bare_loop import train_on_ranks
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import tiny_recipe, write_data_set
from support.uneven import (
    Arrays,
    all_trained,
    collectives_of_a_step,
    restored_and_gone_on,
    saved_and_gone_on,
    trained,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.02, "weight_decay": 0.1},
    "lamb": {"name": "lamb", "lr": 0.02, "weight_decay": 0.1},
    "muon": {"name": "muon", "lr": 0.02, "weight_decay": 0.1},
}
TOLERANCES = {"adamw": 1e-5, "lamb": 1e-5, "muon": 1e-4}
"""Gradients are fp32 sums in another order: some 1e-7 apart, which six steps add up and Adam's
division by small roots enlarges. Newton-Schulz enlarges small singular values by up to
3.4445^5 = 485."""

each = pytest.mark.parametrize("name", OPTIMIZERS)


def assert_equal(found: Arrays, wanted: Arrays, tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(
            found[name], wanted[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


@each
def test_equal_at_one_two_and_three_ranks(name: str) -> None:
    alone = run_ranks(1, trained, OPTIMIZERS[name], {})[0]
    for size in (2, 3):
        for found in run_ranks(size, trained, OPTIMIZERS[name], {}):
            assert_equal(found, alone, TOLERANCES[name])


def test_equal_where_shards_are_replicated() -> None:
    alone = run_ranks(1, all_trained, OPTIMIZERS, {})[0]
    for found in run_fresh_ranks(4, all_trained, OPTIMIZERS, {"replicate": 2}):
        for name in OPTIMIZERS:
            assert_equal(found[name], alone[name], TOLERANCES[name])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("adamw", {}), ("lamb", {"all_reduce": 1}), ("muon", {"all_to_all_single": 2})],
)
def test_collectives_do_not_grow_with_the_number_of_tensors(
    name: str, wanted: dict[str, int]
) -> None:
    assert run_ranks(2, collectives_of_a_step, OPTIMIZERS[name]) == [wanted] * 2


@each
def test_a_checkpoint_goes_on_at_another_size(name: str, tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    saved, later = run_ranks(2, saved_and_gone_on, OPTIMIZERS[name], {}, url)[0]
    assert any(".momentum_buffer" in key for key in saved) == (name == "muon")
    for size in (1, 2, 3):
        restored, found = run_ranks(size, restored_and_gone_on, OPTIMIZERS[name], {}, url)[0]
        assert_equal(restored, saved, 0.0)
        assert_equal(found, later, TOLERANCES[name])


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_losses_of_bert_are_equal_at_any_size(name: str, tmp_path: Path) -> None:
    write_data_set(tmp_path, samples=150)
    optimizer = {"name": name, "lr": 1e-3}
    recipe = tiny_recipe(tmp_path, tmp_path / "runs", steps=6, optimizer=optimizer)
    alone = run_ranks(1, train_on_ranks, recipe)[0]
    for size in (2, 3):
        records = run_ranks(size, train_on_ranks, recipe)[0]
        assert [r.loss for r in records] == pytest.approx([r.loss for r in alone], rel=1e-5)
    assert alone[-1].loss < alone[0].loss
