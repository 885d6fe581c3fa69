"""What the workers send each other is a choice; what they learn is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from support.clip_ranks import SHAPES, Case, whole_norm
from support.ranks import run_fresh_ranks, run_ranks
from support.reduction_ranks import (
    each,
    looked_at_between_steps,
    messages_each_way,
    peaks_each_way,
    summed_each_way,
    train_each_way,
)
from support.synthetic import tiny_recipe, write_data_set
from support.uneven import restored_and_gone_on, saved_and_gone_on

RELATIVE = 1e-5
"""As in `test_step.py`: fp32 sums in another order."""
ROUNDING = 2.0**-8
"""Half of what bfloat16's last of 8 bits is worth, relative: the most that one rounding changes."""
SAME_SUMS: list[dict[str, Any]] = [
    {"prefetch": 1},
    {"prefetch": 9},
    {"reshard_after_forward": False},
    {"overlap_on_cpu": True},
    {"overlap_on_cpu": True, "prefetch": 2, "reshard_after_forward": False},
]
REPLICAS = {"replicate": "all"}
BF16 = {"reduce_dtype": "bf16"}
EACH = {"gradient_sync": "micro_batch"}
OPTIMIZERS = {
    "adamw": {"lr": 0.02},
    "lamb": {"name": "lamb", "lr": 0.02},
    "muon": {"name": "muon", "lr": 0.02},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=400)
    # several micro-batches a step, on every rank
    return tiny_recipe(folder, folder / "runs", steps=3, micro_batch_tokens=96)


def _bits(records: list[Any]) -> list[tuple[float, float]]:
    return [(record.loss, record.gradient_norm) for record in records]


def test_what_only_moves_messages_changes_no_bit(recipe: dict[str, Any]) -> None:
    default, *others = run_ranks(2, train_each_way, recipe, [{}, *SAME_SUMS])[0]
    assert min(record.micro_batches for record in default) > 1
    for way, found in zip(SAME_SUMS, others, strict=True):
        assert _bits(found) == _bits(default), way


def test_recomputed_activations_change_no_bit_of_it(recipe: dict[str, Any]) -> None:
    recomputing = {**recipe, "activation_checkpointing": "full", "steps": 2}
    default, *others = run_ranks(2, train_each_way, recomputing, [{}, *SAME_SUMS])[0]
    for way, found in zip(SAME_SUMS, others, strict=True):
        assert _bits(found) == _bits(default), way


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_whole_copies_learn_the_same(world_size: int, recipe: dict[str, Any]) -> None:
    ways = [{}, REPLICAS, {**REPLICAS, "overlap_on_cpu": True}]
    for sharded, copied, overlapped in run_fresh_ranks(world_size, train_each_way, recipe, ways):
        assert [r.loss for r in copied] == pytest.approx([r.loss for r in sharded], rel=RELATIVE)
        assert _bits(overlapped) == _bits(copied)


def test_parameters_travel_as_often_as_they_should() -> None:
    """Two blocks and what is left, three micro-batches."""
    kept = {"reshard_after_forward": False}
    ways = [{}, kept, REPLICAS, {**REPLICAS, **BF16}, {**kept, **BF16}, EACH, {**kept, **EACH}]
    ways += [{**REPLICAS, **EACH}, {**REPLICAS, **BF16, **EACH}]
    ranks = run_fresh_ranks(2, messages_each_way, 3, ways)
    default, once, copied, copied_bf16, once_bf16, each_one, each_kept, *each_copied = ranks[0]
    assert each_copied == [{"all_reduce": 3}] * 2, "once a step, also where it is our own"
    assert each_one == {"all_gather_single": 3 * (2 * 2 + 1), "reduce_scatter_single": 3 * 3}
    assert each_kept == {"all_gather_single": 3, "reduce_scatter_single": 3 * 3}
    assert default == {"all_gather_single": 3 * (2 * 2 + 1), "reduce_scatter_single": 3}
    assert once == {"all_gather_single": 3, "reduce_scatter_single": 3}
    assert copied == copied_bf16 == {"all_reduce": 3}
    assert once_bf16 == {"all_gather_single": 3, "all_to_all_single": 3}


@pytest.mark.parametrize("clip", [{}, {"method": "bucketwise", "max_norm": 0.05}])
def test_gradients_summed_after_every_micro_batch_are_the_same(
    clip: dict[str, Any], recipe: dict[str, Any]
) -> None:
    clipped = {**recipe, "clip": clip}
    ways = [{}, EACH, {**EACH, "reshard_after_forward": False, "prefetch": 2}]
    default, *others = run_ranks(2, train_each_way, clipped, ways)[0]
    assert min(record.micro_batches for record in default) > 1
    for found in others:
        assert [r.loss for r in found] == pytest.approx([r.loss for r in default], rel=1e-6)
        norms = [r.gradient_norm for r in found]
        assert norms == pytest.approx([r.gradient_norm for r in default], rel=1e-5)


def test_gradients_of_several_micro_batches_lie_sharded(recipe: dict[str, Any]) -> None:
    for parameters, (once, each_one) in run_ranks(2, peaks_each_way, recipe, [{}, EACH]):
        assert each_one < once - 0.3 * parameters


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline": 2}, "which sums gradients after all backward passes"),
        ({"virtual_ranks": 4}, "which sums in a fixed order"),
        ({"overlap_on_cpu": True}, "needs one sum per step"),
        ({"clip": {"method": "bucketwise", "scope": "local"}}, "clips each worker's part"),
    ],
)
def test_where_gradients_are_summed_once(
    changes: dict[str, Any], reason: str, recipe: dict[str, Any]
) -> None:
    clip = changes.pop("clip", {})
    workers = {**recipe["workers"], "min": 2, "max": 2}
    optimizer = {"lr": 1e-3, "fused": False}
    for sync in ("micro_batch", "auto"):
        values = {**recipe, "clip": clip, "workers": workers, "optimizer": optimizer}
        values["parallel"] = {**changes, "gradient_sync": sync}
        lines = dict(cross_field_problems(Recipe.model_validate(values)))
        assert f"'{sync}': expected step" in lines["parallel", "gradient_sync"]
        assert reason in lines["parallel", "gradient_sync"]


def test_kept_parameters_are_never_stale() -> None:
    """As an evaluation between two steps might leave them."""
    without, looked = run_ranks(2, looked_at_between_steps, {"reshard_after_forward": False})[0]
    assert all(np.array_equal(without[name], looked[name]) for name in without)


def _random_case(seed: int, num_ranks: int) -> Case:
    rng = np.random.default_rng(seed)
    parts = [
        [
            [
                (rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 3)).astype(np.float32)
                for shape in SHAPES
            ]
            for _ in range(3)
        ]
        for _ in range(num_ranks)
    ]
    return Case(parts, [1 / num_ranks] * num_ranks)


def _case_of_small_additions(num_ranks: int) -> Case:
    """1 + 2^-9 is 1 in bfloat16; 1 + 64 * 2^-9, and as often as there may be ranks, is not."""
    values = [1.0, *[2.0**-9] * 64]
    rank = [[np.full(shape, value, np.float32) for shape in SHAPES] for value in values]
    return Case([rank] * num_ranks, [1 / num_ranks] * num_ranks)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_bf16_rounds_each_part_once_and_sums_over_copies(world_size: int) -> None:
    """The largest error there can be, element by element: sharded, of one rounding of each part;
    over copies also of every partial sum. Micro-batches are added up in fp32 all the same."""
    cases = [_random_case(seed, world_size) for seed in range(5)]
    ways = [{}, BF16, {**BF16, "overlap_on_cpu": True}, {**BF16, **REPLICAS}]
    small = _case_of_small_additions(world_size)
    ranks = run_fresh_ranks(world_size, summed_each_way, ways, [*cases, small])
    exact, sharded, overlapped, copied = ranks[0]
    for found, roundings in ((sharded, 1), (copied, world_size)):
        for case, wanted, rounded in zip(cases, exact, found, strict=False):
            assert rounded.norm == pytest.approx(whole_norm(rounded.buckets), rel=1e-6)
            for bucket in range(len(SHAPES)):
                locals_ = [np.sum([part[bucket] for part in rank], axis=0) for rank in case.parts]
                largest = np.sum(np.abs(locals_), axis=0) * ((1 + ROUNDING) ** roundings - 1 + 1e-6)
                error = np.abs(rounded.buckets[bucket] - wanted.buckets[bucket])
                assert (error <= largest).all()
                assert error.any()
        assert all((bucket == world_size * 1.125).all() for bucket in found[-1].buckets)
    for one, other in zip(sharded, overlapped, strict=True):
        assert all(map(np.array_equal, one.buckets, other.buckets))


def test_checkpoints_of_whole_copies_go_on_sharded_and_back(tmp_path: Path) -> None:
    """Copies that FSDP2 sums, and copies that this package does."""
    adamw, ways = OPTIMIZERS["adamw"], [REPLICAS, {**REPLICAS, "overlap_on_cpu": True}]
    urls, back = [str(tmp_path / str(way)) for way in range(len(ways))], str(tmp_path / "back")
    copies = [(adamw, way, url) for way, url in zip(ways, urls, strict=True)]
    saved = run_fresh_ranks(2, each, saved_and_gone_on, copies)[0]
    restored = run_ranks(3, each, restored_and_gone_on, [(adamw, {}, url) for url in urls])[0]
    saved += [run_ranks(2, saved_and_gone_on, adamw, {}, back)[0]] * len(ways)
    copies = [(adamw, way, back) for way in ways]
    restored += run_fresh_ranks(3, each, restored_and_gone_on, copies)[0]
    for (before, later), (after, found) in zip(saved, restored, strict=True):
        assert all(np.array_equal(after[name], before[name]) for name in before)
        for name, wanted in later.items():
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "key", "line"),
    [
        (
            {"parallel": {"virtual_ranks": 2, **BF16}, "optimizer": {"lr": 1, "fused": False}},
            ("parallel", "reduce_dtype"),
            "parallel.reduce_dtype: 'bf16': expected fp32 if parallel.virtual_ranks is set, "
            "which sums in a fixed order and in fp32",
        ),
        (
            {
                "parallel": {"virtual_ranks": 2, "overlap_on_cpu": True},
                "optimizer": {"lr": 1, "fused": False},
            },
            ("parallel", "overlap_on_cpu"),
            "parallel.overlap_on_cpu: True: expected false if parallel.virtual_ranks is set, "
            "which sums in a fixed order and in fp32",
        ),
        (
            {"parallel": BF16, "clip": {"method": "bucketwise"}},
            ("parallel", "reduce_dtype"),
            "parallel.reduce_dtype: 'bf16': expected fp32 if clip.method is bucketwise, which "
            "clips every bucket before or after its sum",
        ),
        (
            {"parallel": {"overlap_on_cpu": True}, "clip": {"method": "bucketwise"}},
            ("parallel", "overlap_on_cpu"),
            "parallel.overlap_on_cpu: True: expected false if clip.method is bucketwise, which "
            "clips every bucket before or after its sum",
        ),
        (
            {"parallel": REPLICAS, "clip": {"method": "bucketwise", "scope": "local"}},
            ("clip", "scope"),
            "clip.scope: 'local': expected reduced if parallel.replicate is all: a copy of the "
            "model on a single worker is not clipped before its sum",
        ),
        (
            {
                "parallel": {**REPLICAS, "virtual_ranks": 2},
                "optimizer": {"lr": 1, "fused": False},
            },
            ("parallel", "replicate"),
            "parallel.replicate: 'all': expected 1 if parallel.virtual_ranks is set, because "
            "copies would be summed in another order",
        ),
    ],
)
def test_what_does_not_go_together(
    changes: dict[str, Any], key: tuple[str, str], line: str
) -> None:
    recipe = Recipe.model_validate(tiny_recipe("data", "runs", **changes))
    assert cross_field_problems(recipe) == [(key, line)]
