"""Losses that are equal to the bit at any number of workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrata.step.norms import reproducible_norm
from elastrata_pipelines.deal import WorkModel, deal
from elastrata_pipelines.virtual_ranks import deal_to_virtual
from support.bare_loop import train_on_ranks
from support.ranks import run_ranks
from support.synthetic import MODERNBERT, tiny_recipe, write_data_set

WORK = WorkModel(linear=100, quadratic=1)
STEPS = 40


@given(
    lengths=st.lists(st.integers(1, 60), max_size=60),
    virtual_ranks=st.integers(1, 12),
    num_ranks=st.integers(1, 12),
)
def test_what_a_virtual_rank_gets_does_not_depend_on_who_plays_it(
    lengths: list[int], virtual_ranks: int, num_ranks: int
) -> None:
    num_ranks = min(num_ranks, virtual_ranks)
    budget = 64
    whole = deal(lengths, num_ranks=virtual_ranks, work=WORK, tokens_per_micro_batch=budget)
    dealt = deal_to_virtual(
        lengths,
        virtual_ranks=virtual_ranks,
        num_ranks=num_ranks,
        work=WORK,
        tokens_per_micro_batch=budget,
    )
    rounds = -(-virtual_ranks // num_ranks)
    assert dealt.rounds == rounds
    per_round = len(whole.hands[0].cuts) - 1
    assert {len(hand.cuts) - 1 for hand in dealt.hands} == {rounds * per_round}
    for virtual in range(rounds * num_ranks):
        hand = dealt.hands[virtual % num_ranks]
        first = virtual // num_ranks * per_round
        played = [
            hand.rows[hand.cuts[m] : hand.cuts[m + 1]].tolist()
            for m in range(first, first + per_round)
        ]
        if virtual >= virtual_ranks:
            assert played == [[]] * per_round
            continue
        own = whole.hands[virtual]
        assert played == [
            own.rows[own.cuts[m] : own.cuts[m + 1]].tolist() for m in range(per_round)
        ]


@given(
    values=st.lists(
        st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False), min_size=1, max_size=200
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_norm_that_no_order_changes(values: list[float], seed: int) -> None:
    draw = np.random.default_rng(seed)
    one = reproducible_norm([torch.tensor(values)])
    shuffled = torch.tensor(values)[torch.from_numpy(draw.permutation(len(values)))]
    cut = int(draw.integers(0, len(values) + 1))
    assert reproducible_norm([shuffled[:cut], shuffled[cut:]]).item() == one.item()
    exact = math.sqrt(math.fsum(float(value) ** 2 for value in torch.tensor(values).tolist()))
    assert one.item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad: float) -> None:
    assert not math.isfinite(reproducible_norm([torch.tensor([1.0, bad])]))
    assert reproducible_norm([torch.zeros(3), torch.zeros(0)]).item() == 0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=400)
    return tiny_recipe(
        folder,
        folder / "runs",
        steps=STEPS,
        optimizer={"lr": 1e-2, "fused": False},
        clip={"max_norm": 0.5},
        parallel={"virtual_ranks": 6},
    )


def _bits(recipe: dict[str, Any], world_size: int) -> list[tuple[float, float]]:
    records = run_ranks(world_size, train_on_ranks, recipe)[0]
    return [(record.loss, record.gradient_norm) for record in records]


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, (3,)),
        pytest.param({}, (2, 4), marks=pytest.mark.matrix),
        ({"workload": MODERNBERT}, (3,)),
        pytest.param({"workload": MODERNBERT}, (2, 4), marks=pytest.mark.matrix),
    ],
)
def test_losses_are_equal_to_the_bit_at_any_world_size(
    recipe: dict[str, Any], changes: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    recipe = {**recipe, **changes}
    alone = _bits(recipe, 1)
    assert alone[-1][0] < alone[0][0] - 0.5
    assert any(norm > 0.5 for _, norm in alone)
    for world_size in sizes:
        assert _bits(recipe, world_size) == alone


@pytest.mark.matrix
def test_without_virtual_ranks_they_are_only_alike(recipe: dict[str, Any]) -> None:
    plain = {**recipe, "parallel": {}}
    alone, two = _bits(plain, 1), _bits(plain, 2)
    assert alone != two
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in alone], rel=1e-5)
