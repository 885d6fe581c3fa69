"""Clipping by bucket: its bounds, at any world size, layout and precision."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.step.bucket_clip import bucket_limits, scale_down
from elastrata.step.norms import gradient_norm, tensor_norm
from elastrata.step.train_step import share_of
from elastrata.workload.batch import Batch
from support.bare_loop import train_on_ranks
from support.clip_ranks import Case, clip_on_ranks, clip_plainly, random_case, whole_norm
from support.poison import train_poisoned
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import tiny_recipe, write_data_set

SCOPES = ["reduced", "local"]
LATE = ("reduced", True)
"""After the backward pass, as where weights are held at zero."""
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 2)]
"""World size, copies of the model."""
MAX_NORM = 0.5
WAYS = [*((scope, False) for scope in SCOPES), LATE]
QUICK = {
    *product([(1, 1)], WAYS, ["fp32", "bf16"]),
    ((2, 1), ("reduced", False), "bf16"),
    ((2, 1), LATE, "fp32"),
    ((3, 1), ("local", False), "fp32"),
    ((4, 2), ("local", False), "bf16"),
    ((4, 2), LATE, "fp32"),
}
"""Every layout, way and precision, but not with one another."""
EVERY = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix)
    for case in product(LAYOUTS, WAYS, ["fp32", "bf16"])
]


def bucketwise(scope: str, max_norm: float = MAX_NORM) -> dict[str, object]:
    return {"method": "bucketwise", "scope": scope, "max_norm": max_norm}


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200), st.floats(1e-6, 1e6))
def test_limits_make_up_the_whole(num_parameters, max_norm) -> None:
    limits = bucket_limits(num_parameters, max_norm)
    assert math.sqrt(sum(limit**2 for limit in limits)) == pytest.approx(max_norm, rel=1e-12)
    sizes = [limit**2 / number for limit, number in zip(limits, num_parameters, strict=True)]
    assert sizes == pytest.approx([sizes[0]] * len(sizes), rel=1e-9)


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50),
    st.integers(-30, 25),
    st.floats(1e-6, 1e6),  # so that what scales is a number of all digits in fp32
)
def test_scaled_down_is_never_above_and_else_the_same(values, exponent, limit) -> None:
    before = torch.tensor(values) * 10.0**exponent
    after, norm = before.clone(), tensor_norm(before)
    scale_down(after, norm, limit)
    if norm <= limit:
        assert torch.equal(before, after)
    else:
        assert tensor_norm(after) == pytest.approx(limit, rel=2e-6)
    assert tensor_norm(after) <= limit or norm <= limit


def test_norms_of_many_numbers_are_right() -> None:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(33_000_001, generator=generator) * 1e-3
    parts = [large, large[:5000].view(50, 100), large[:3]]
    expected = torch.linalg.vector_norm(torch.cat([part.flatten() for part in parts]).double())
    # rows are added up in fp32: some 1e-7 each, in both directions
    assert tensor_norm(large) == pytest.approx(float(large.double().norm()), rel=1e-6)
    assert gradient_norm(parts) == pytest.approx(float(expected), rel=1e-6)
    for extreme in (1e30, 1e-30):
        values = large[:100_000] * extreme
        assert tensor_norm(values) == pytest.approx(float(values.double().norm()), rel=1e-12)


@given(st.data(), st.integers(1, 8))
def test_shares_add_up(data, num_ranks) -> None:
    weight = st.integers(0, 50).map(float)
    drawn = st.lists(st.fixed_dictionaries({"mlm": weight, "nsp": weight}), max_size=3)
    ranks = [
        [Batch(weights=weights, num_positions=0) for weights in data.draw(drawn)]
        for _ in range(num_ranks)
    ]
    total = {
        term: sum(batch.weights[term] for rank in ranks for batch in rank)
        for term in ("mlm", "nsp")
    }
    shares = [share_of(rank, total) for rank in ranks]
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1 if any(total.values()) else 0)


@pytest.mark.parametrize(("layout", "way", "precision"), EVERY)
def test_never_above_the_limit_and_as_defined(
    layout: tuple[int, int], way: tuple[str, bool], precision: str
) -> None:
    """Two micro-batches; with several ranks, uneven shares and one that is empty."""
    (world_size, replicate), (scope, sparse) = layout, way
    clip = bucketwise(scope)
    cases = [random_case(seed, world_size) for seed in range(6)]
    run = run_ranks if replicate == 1 else run_fresh_ranks
    copies = {"replicate": replicate}
    ranks = run(world_size, clip_on_ranks, copies, precision, clip, cases, sparse)
    for found, case in zip(ranks[0], cases, strict=True):
        wanted = clip_plainly(clip, case)
        assert whole_norm(found.buckets) <= MAX_NORM
        assert found.norm == pytest.approx(wanted.norm, rel=1e-5)
        for bucket, plain in zip(found.buckets, wanted.buckets, strict=True):
            np.testing.assert_allclose(bucket, plain, rtol=0, atol=1e-5 * whole_norm([plain]))
    for other in ranks[1:]:
        assert [clipped.norm for clipped in other] == [clipped.norm for clipped in ranks[0]]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("world_size", "replicate"), [(1, 1), (2, 1)])
def test_below_the_limit_no_bit_changes(world_size, replicate, scope) -> None:
    cases = [random_case(seed, world_size) for seed in range(5)]
    arguments = ({"replicate": replicate}, "fp32")
    plain, clipped = (
        run_ranks(world_size, clip_on_ranks, *arguments, clip, cases)[0]
        for clip in ({"method": "none"}, bucketwise(scope, max_norm=1e30))
    )
    for one, other in zip(plain, clipped, strict=True):
        assert all(map(np.array_equal, one.buckets, other.buckets))


@pytest.mark.parametrize(("scope", "sparse"), [*((scope, False) for scope in SCOPES), LATE])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_not_finite_is_seen_by_all_ranks(world_size, scope, sparse) -> None:
    """Also where it comes from a rank of little weight, and from an earlier micro-batch."""
    cases = []
    for bad in (math.nan, math.inf, -math.inf):
        for bucket in range(3):
            parts = random_case(0, world_size).parts
            parts[-1][0][bucket].flat[-1] = bad
            cases.append(Case(parts, [1.0, 0.0][:world_size]))
    arguments = ({}, "fp32", bucketwise(scope), cases, sparse)
    for found in run_ranks(world_size, clip_on_ranks, *arguments):
        assert not any(math.isfinite(clipped.norm) for clipped in found)


@pytest.mark.parametrize("scope", SCOPES)
def test_squares_that_do_not_fit_into_fp32_are_clipped(scope) -> None:
    cases = [Case([[[bucket * 0 + 1e30 for bucket in random_case(0, 1).parts[0][0]]]], [1.0])]
    found = run_ranks(1, clip_on_ranks, {}, "fp32", bucketwise(scope), cases)[0][0]
    assert whole_norm(found.buckets) == pytest.approx(MAX_NORM, rel=1e-5)
    assert math.isfinite(found.norm)


def test_copies_on_one_worker_each() -> None:
    clip, cases = bucketwise("reduced"), [random_case(1, 2)]
    found = run_fresh_ranks(2, clip_on_ranks, {"replicate": 2}, "fp32", clip, cases)[0][0]
    assert found.norm == pytest.approx(clip_plainly(clip, cases[0]).norm, rel=1e-5)
    assert whole_norm(found.buckets) <= MAX_NORM
    with pytest.raises(ValueError, match="at least two workers per copy"):
        run_fresh_ranks(2, clip_on_ranks, {"replicate": 2}, "fp32", bucketwise("local"), cases)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    return tiny_recipe(folder, folder / "runs", steps=8)


@pytest.mark.parametrize("batch_size", [21, 2])
def test_reduced_gives_the_same_losses_at_any_world_size(batch_size, recipe) -> None:
    """Of a batch of 2 samples, one of 3 ranks has none."""
    clipped = {**recipe, "batch_size": batch_size, "clip": bucketwise("reduced", 0.1)}
    free = {**clipped, "clip": {"method": "none"}}
    alone, others, unclipped = (
        run_ranks(world_size, train_on_ranks, changed)[0]
        for world_size, changed in ((1, clipped), (3, clipped), (1, free))
    )
    assert [r.digest for r in others] == [r.digest for r in alone]
    assert [r.loss for r in others] == pytest.approx([r.loss for r in alone], rel=1e-5)
    assert [r.gradient_norm for r in others] == pytest.approx(
        [r.gradient_norm for r in alone], rel=1e-4
    )
    assert all(r.gradient_norm > 0.1 for r in alone), "every step is clipped"
    assert [r.loss for r in alone] != pytest.approx([r.loss for r in unclipped], rel=1e-4)


@pytest.mark.parametrize("batch_size", [21, 2])
def test_local_keeps_the_limit_in_training(batch_size, recipe) -> None:
    clipped = {**recipe, "batch_size": batch_size, "clip": bucketwise("local", 0.1)}
    alone, others = (run_ranks(n, train_on_ranks, clipped)[0] for n in (1, 3))
    assert [r.digest for r in others] == [r.digest for r in alone]
    assert all(0.01 < r.gradient_norm <= 0.1 for r in (*alone, *others))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_poisoned_batch_is_left_out(scope, recipe) -> None:
    skipping = {**recipe, "on_nonfinite": "skip", "clip": bucketwise(scope)}
    ranks = run_ranks(2, train_poisoned, skipping)
    skipped = [[r.step for r in records if r.skipped] for records in ranks]
    assert 0 < len(skipped[0]) < 8
    assert skipped[0] == skipped[1]
    assert math.isfinite(ranks[0][-1].loss) or ranks[0][-1].skipped


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"clip": {"scope": "local"}},
            "clip.scope: 'local': expected clip.method bucketwise, not global_norm",
        ),
        (
            {
                "clip": {"scope": "local", "method": "bucketwise"},
                "workers": {"min": 1, "max": 4},
                "parallel": {"replicate": 2},
            },
            "clip.scope: 'local': expected workers.min above parallel.replicate (2): a copy of the "
            "model on a single worker is not clipped before its sum; or scope reduced",
        ),
        (
            {
                "clip": {"scope": "local", "method": "bucketwise"},
                "workload": {"name": "gpt", "num_layers": 2},
                "workers": {"min": 4, "max": 8},
                "parallel": {"pipeline": 2, "replicate": 2},
            },
            "clip.scope: 'local': expected workers.min / parallel.pipeline above "
            "parallel.replicate (2): a copy of the model on a single worker is not clipped before "
            "its sum; or scope reduced",
        ),
    ],
)
def test_what_cannot_be_is_told(changes, line, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path, **changes))
    assert cross_field_problems(recipe) == [(("clip", "scope"), line)]
