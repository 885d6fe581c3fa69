"""One run at any size: the same samples and, up to the order of summation, the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.bare_loop import train_on_ranks
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import MODERNBERT, tiny_recipe, write_data_set

RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 each; eight steps of AdamW add to that."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    return folder


@pytest.fixture(scope="module")
def recipe(request: pytest.FixtureRequest, data: Path) -> dict[str, object]:
    """BERT's, or another workload's where a test says so."""
    # 21 samples a step, so that no world size divides them; 8 steps run over the epoch's end
    return tiny_recipe(data, data / "runs", steps=8, batch_size=21, **getattr(request, "param", {}))


@pytest.fixture(scope="module")
def alone(recipe: dict[str, object]) -> list[object]:
    return run_ranks(1, train_on_ranks, recipe)[0]


BERT: dict[str, object] = {}
MODERN = {"workload": MODERNBERT}


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        *(pytest.param(BERT, size, id=f"bert {size}") for size in (2, 3, 4)),
        pytest.param(MODERN, 3, id="modernbert 3"),
        *(
            pytest.param(MODERN, size, id=f"modernbert {size}", marks=pytest.mark.matrix)
            for size in (2, 4)
        ),
    ],
    indirect=["recipe"],
)
def test_losses_are_equal_at_any_world_size(world_size, recipe, alone) -> None:
    for records in run_ranks(world_size, train_on_ranks, recipe):
        assert [r.digest for r in records] == [r.digest for r in alone]
        assert [r.samples for r in records] == [21 * k for k in range(1, 9)]
        assert [r.tokens for r in records] == [r.tokens for r in alone]
        assert [r.loss for r in records] == pytest.approx([r.loss for r in alone], rel=RELATIVE)
        assert [r.gradient_norm for r in records] == pytest.approx(
            [r.gradient_norm for r in alone], rel=1e-4
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_tokens": 48},
        {"activation_checkpointing": "full"},
        {"parallel": {"replicate": 2}},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(BERT, id="bert"),
        pytest.param(MODERN, id="modernbert", marks=pytest.mark.matrix),
    ],
    indirect=True,
)
def test_how_it_is_computed_does_not_change_the_losses(changes, recipe, alone) -> None:
    records = run_fresh_ranks(4, train_on_ranks, {**recipe, **changes})[0]
    assert [r.digest for r in records] == [r.digest for r in alone]
    assert [r.loss for r in records] == pytest.approx([r.loss for r in alone], rel=RELATIVE)


def test_a_rank_without_rows_takes_part(recipe, alone) -> None:
    short = {**recipe, "batch_size": 2, "steps": 3}
    one, many = run_ranks(1, train_on_ranks, short)[0], run_ranks(4, train_on_ranks, short)[0]
    assert [r.loss for r in many] == pytest.approx([r.loss for r in one], rel=RELATIVE)


def test_bf16_follows_fp32(recipe, alone) -> None:
    records = run_ranks(2, train_on_ranks, {**recipe, "precision": "bf16"})[0]
    # bfloat16 keeps 8 bits of a number: 2^-8 a rounding, of which many average out
    assert [r.loss for r in records] == pytest.approx([r.loss for r in alone], rel=2e-2)
    assert [r.loss for r in records] != [r.loss for r in alone]


def test_another_seed_is_another_run(recipe, alone) -> None:
    records = run_ranks(1, train_on_ranks, {**recipe, "seed": 1})[0]
    assert {r.digest for r in records}.isdisjoint({r.digest for r in alone})
