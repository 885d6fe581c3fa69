"""Ranks that compute every sample together learn what one process learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from elastrata.parallel.mesh import data_rank
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import MODERNBERT, tiny_recipe, write_data_set
from support.tensor_ranks import norms_of_weights, resume_all, save_all, train_all

RELATIVE = 1e-5
"""As in `test_step.py`: fp32 sums in another order."""
STEPS, SAVED_AT = 8, 4
TENSOR = {"tensor": 2}
SEQUENCE = {"tensor": 2, "sequence": True}
SIZES = {"hidden_size": 36, "num_layers": 2, "num_heads": 2, "max_positions": 48, "dropout": 0.1}
"""Two ranks get 18 rows of a matrix each, and two of them 9 of these."""
LLAMA = {
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "bias": False,
    "num_heads": 6,
    "num_kv_heads": 2,
    "intermediate_size": 42,
}
EVEN = {"embedding_multiple": 2}
"""The vocabulary has 97 ids: with a row more, two ranks can divide the table."""
RUNS: dict[str, dict[str, Any]] = {
    "bert": {"workload": {"name": "bert", **SIZES, **EVEN, "next_sentence": True}},
    # several micro-batches a step, some of them without samples
    "gpt2": {"workload": {"name": "gpt", **SIZES, **EVEN}, "micro_batch_tokens": 64},
    "llama": {
        "workload": {"name": "gpt", **SIZES, **LLAMA, **EVEN, "tied_embeddings": False},
        "activation_checkpointing": "full",
    },
    "stable gpt": {
        "workload": {"name": "gpt", **SIZES, **LLAMA, **EVEN, "qk_norm": True, "z_loss": 0.01},
        "micro_batch_tokens": 64,
        "activation_checkpointing": "selective",
    },
    "stable bert": {"workload": {"name": "bert", **SIZES, "qk_norm": True, "z_loss": 0.01}},
    "whole table": {"workload": {"name": "gpt", **SIZES, **LLAMA}},
    "modernbert": {
        "workload": {**MODERNBERT, "hidden_size": 36, "intermediate_size": 42, **EVEN},
        "micro_batch_tokens": 64,
        "activation_checkpointing": "selective",
    },
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("data")
    write_data_set(folder / "plain", samples=150)
    write_data_set(folder / "pairs", samples=150, pairs=True)
    common: dict[str, Any] = {"steps": STEPS, "batch_size": 9, "micro_batch_tokens": 512}
    return {
        name: tiny_recipe(
            folder / ("pairs" if name == "bert" else "plain"), folder / "runs", **common | changes
        )
        for name, changes in RUNS.items()
    }


@pytest.fixture(scope="module")
def alone(recipes: dict[str, Any]) -> Callable[[str], list[Any]]:
    """The records of one process."""
    return cache(lambda name: run_ranks(1, train_all, [recipes[name]])[0][0])


def _assert_equal(found: list[Any], wanted: list[Any], case: str) -> None:
    assert [(r.step, r.digest) for r in found] == [(r.step, r.digest) for r in wanted], case
    assert [(r.samples, r.tokens) for r in found] == [(r.samples, r.tokens) for r in wanted], case
    for name in ("loss", "gradient_norm"):
        values, right = ([getattr(record, name) for record in run] for run in (found, wanted))
        assert values == pytest.approx(right, rel=RELATIVE), f"{case}: {name}"
    for one, other in zip(found, wanted, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=0.05), case


@pytest.mark.parametrize(
    ("names", "world_size", "ways"),
    [
        pytest.param(["stable gpt", "modernbert"], 2, [SEQUENCE], id="tp2"),
        pytest.param(RUNS, 2, [{}], id="dp2", marks=pytest.mark.matrix),
        pytest.param(RUNS, 2, [TENSOR, SEQUENCE], id="tp2 all", marks=pytest.mark.matrix),
        pytest.param(RUNS, 4, [TENSOR, SEQUENCE], id="dp2 tp2", marks=pytest.mark.matrix),
    ],
)
def test_losses_are_equal_however_the_model_is_divided(
    names: Iterable[str],
    world_size: int,
    ways: list[dict[str, Any]],
    recipes: dict[str, Any],
    alone: Callable[[str], list[Any]],
) -> None:
    cases = [(name, {**recipes[name], "parallel": way}) for name in names for way in ways]
    ranks = run_fresh_ranks(world_size, train_all, [recipe for _, recipe in cases])
    for runs in ranks:
        for (name, recipe), found in zip(cases, runs, strict=True):
            _assert_equal(found, alone(name), f"{name}: {recipe['parallel']}")


@pytest.mark.matrix  # thirteen ranks; `test_pipeline_parallel.py` has a quick one
def test_checkpoints_go_on_with_the_model_divided_and_back(
    tmp_path: Path, recipes: dict[str, Any], alone: Callable[[str], list[Any]]
) -> None:
    """Over four ranks, two of them share a part of a matrix, unevenly."""
    names = ["bert", "gpt2", "modernbert"]
    whole, divided = (
        [
            ({**recipes[name], "parallel": way}, str(tmp_path / f"{name} {len(way)}"))
            for name in names
        ]
        for way in ({}, TENSOR)
    )
    run_ranks(2, save_all, whole, SAVED_AT)
    run_fresh_ranks(4, save_all, divided, SAVED_AT)
    onto = [(recipe, url) for (recipe, _), (_, url) in zip(divided, whole, strict=True)]
    back = [(recipe, url) for (recipe, _), (_, url) in zip(whole, divided, strict=True)]
    ranks = [*run_fresh_ranks(2, resume_all, onto), *run_ranks(3, resume_all, back)]
    evaluated = [loss for _, loss in ranks[0]]
    for runs in ranks:
        for name, (records, loss), wanted in zip(names, runs, evaluated, strict=True):
            _assert_equal(records, alone(name)[SAVED_AT:], name)
            assert loss.terms == pytest.approx(wanted.terms, rel=RELATIVE)


def test_norms_count_every_weight_once(recipes: dict[str, Any]) -> None:
    ((wanted, _),) = run_ranks(1, norms_of_weights, recipes["bert"])
    divided = {**recipes["bert"], "parallel": TENSOR}
    for norms in run_fresh_ranks(4, norms_of_weights, divided):
        assert norms == pytest.approx((wanted, wanted), rel=1e-6)


def test_neighbours_share_their_samples_and_count_them_once() -> None:
    places = [data_rank(rank, 6, 2) for rank in range(6)]
    assert [(p.rank, p.dp_size) for p in places] == [(r // 2, 3) for r in range(6)]
    assert [p.is_primary for p in places] == [True, False] * 3
    with pytest.raises(ValueError, match="5 ranks in groups of 2"):
        data_rank(0, 5, 2)


GPT: dict[str, Any] = {"name": "gpt", **SIZES, **LLAMA}
PAIR = {"min": 2, "max": 4}


@pytest.mark.parametrize(
    ("changes", "key", "line"),
    [
        (
            {"workload": GPT, "parallel": {"tensor": 3}, "workers": {"min": 3, "max": 3}},
            ("parallel", "tensor"),
            "parallel.tensor: 3: expected a divisor of workload.num_heads (6), "
            "workload.intermediate_size (42), workload.num_kv_heads (2); the nearest divisor is 2",
        ),
        (
            {"parallel": {"tensor": 4}, "workers": {"min": 4, "max": 4}},
            ("parallel", "tensor"),
            "parallel.tensor: 4: expected a divisor of workload.num_heads (2), "
            "workload.intermediate_size (128); the nearest divisor is 2",
        ),
        (
            {"parallel": TENSOR, "workers": {"min": 1, "max": 4}},
            ("workers", "min"),
            "workers.min: 1: expected a multiple of parallel.tensor (2), such as 2",
        ),
        (
            {"parallel": TENSOR, "workers": {"min": 2, "max": 5}},
            ("workers", "max"),
            "workers.max: 5: expected a multiple of parallel.tensor (2), such as 4 or 6",
        ),
        (
            {"parallel": {"sequence": True}},
            ("parallel", "sequence"),
            "parallel.sequence: True: requires parallel.tensor of 2 or more, whose workers divide "
            "the tokens",
        ),
        (
            {
                "parallel": {"tensor": 2, "replicate": 2},
                "workers": {"min": 4, "max": 8},
                "clip": {"method": "bucketwise", "scope": "local"},
            },
            ("clip", "scope"),
            "clip.scope: 'local': expected workers.min / parallel.tensor above parallel.replicate "
            "(2): a copy of the model on a single worker is not clipped before its sum; or scope "
            "reduced",
        ),
        (
            {
                "parallel": {"tensor": 2, "virtual_ranks": 3},
                "workers": {"min": 2, "max": 8, "threads": 1},
                "optimizer": {"lr": 1, "fused": False},
            },
            ("parallel", "virtual_ranks"),
            "parallel.virtual_ranks: 3: expected at least workers.max / parallel.tensor (4), one "
            "for every group of workers",
        ),
        (
            {"parallel": {"tensor": 2, "replicate": 3}, "workers": PAIR},
            ("parallel", "replicate"),
            "parallel.replicate: 3: expected at most workers.max / parallel.tensor (2)",
        ),
        (
            {"parallel": TENSOR, "workers": {"min": 8, "max": 8}, "batch_size": 3},
            ("batch_size",),
            "batch_size: 3: expected at least workers.min / parallel.tensor (4), a sample for "
            "every group of workers",
        ),
    ],
)
def test_what_does_not_go_together(
    changes: dict[str, Any], key: tuple[str, str], line: str
) -> None:
    recipe = Recipe.model_validate(tiny_recipe("data", "runs", **changes))
    assert cross_field_problems(recipe) == [(key, line)]
