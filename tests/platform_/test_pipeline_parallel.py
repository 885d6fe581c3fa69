"""Ranks that have some blocks of a model each learn what one process learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.state import ModelTensors
from elastrata.parallel.mesh import data_rank
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.storage import Storage
from support.pipeline_ranks import travel
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import MODERNBERT, tiny_recipe, write_data_set
from support.tensor_ranks import train_all

RELATIVE = 1e-5
"""As in `test_step.py`: fp32 sums in another order."""
STEPS = 10
SIZES = {"hidden_size": 24, "num_layers": 5, "num_heads": 2, "max_positions": 48, "dropout": 0.1}
"""Five blocks: no stages are alike."""
LLAMA = {
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "bias": False,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 40,
}
RUNS: dict[str, dict[str, Any]] = {
    "gpt2": {"workload": {"name": "gpt", **SIZES}},
    "llama": {
        "workload": {"name": "gpt", **SIZES, **LLAMA, "tied_embeddings": False},
        "activation_checkpointing": "full",
    },
    "tied llama": {"workload": {"name": "gpt", **SIZES, **LLAMA, "embedding_multiple": 2}},
    "bert": {"workload": {"name": "bert", **SIZES, "embedding_multiple": 2}},
    "stable bert": {"workload": {"name": "bert", **SIZES, "qk_norm": True, "z_loss": 0.01}},
    "stable gpt": {"workload": {"name": "gpt", **SIZES, **LLAMA, "qk_norm": True, "z_loss": 0.01}},
    "modernbert": {"workload": {**MODERNBERT, "num_layers": 5, "embedding_multiple": 2}},
}
PIPELINE = {"pipeline": 2}
GPIPE = {"pipeline": 2, "schedule": "gpipe", "micro_batches": 4}
BY_SPEED = {**PIPELINE, "stage_speeds": [1, 0.3]}
"""Four blocks and one: the cut of equal speeds is three and two."""
INTERLEAVED = {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble", "reshard_after_forward": False}
CUBE = {"pipeline": 2, "tensor": 2, "sequence": True}
FOUR_RANKS = [
    PIPELINE,
    GPIPE,
    INTERLEAVED,
    ZERO_BUBBLE,
    {**ZERO_BUBBLE, "virtual_stages": 2},
    {"pipeline": 4},
    {"pipeline": 2, "replicate": 2},
]
MATRIX = pytest.mark.matrix
EIGHT_RANKS = [CUBE, {**INTERLEAVED, "tensor": 2}, {**ZERO_BUBBLE, "tensor": 2}]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("data")
    write_data_set(folder / "data", samples=150)
    # Several micro-batches a step, and not always as many as a pipeline has ranks.
    common: dict[str, Any] = {"steps": STEPS, "batch_size": 13, "micro_batch_tokens": 64}
    return {
        name: tiny_recipe(folder / "data", folder / "runs", **common | changes)
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
    ("world_size", "ways"),
    [
        pytest.param(
            2, [("llama", PIPELINE), ("llama", BY_SPEED), ("modernbert", PIPELINE)], id="pp2"
        ),
        pytest.param(2, [("bert", INTERLEAVED)], id="pp2 in turns", marks=MATRIX),
        pytest.param(2, [("gpt2", INTERLEAVED), ("bert", PIPELINE)], id="pp2 too", marks=MATRIX),
        pytest.param(2, [("stable bert", PIPELINE)], id="pp2 stable bert", marks=MATRIX),
        pytest.param(8, [("tied llama", CUBE)], id="pp2 tp2 dp2", marks=MATRIX),
        *(
            pytest.param(4, [(name, way) for way in FOUR_RANKS], id=name, marks=MATRIX)
            for name in RUNS
            if name != "stable bert"
        ),
        *(
            pytest.param(8, [(name, way) for way in EIGHT_RANKS], id=f"{name} 8", marks=MATRIX)
            for name in RUNS
            if name != "stable bert"
        ),
    ],
)
def test_losses_are_equal_however_the_model_is_cut(
    world_size: int,
    ways: list[tuple[str, dict[str, Any]]],
    recipes: dict[str, Any],
    alone: Callable[[str], list[Any]],
) -> None:
    cases = [{**recipes[name], "parallel": way} for name, way in ways]
    for runs in run_fresh_ranks(world_size, train_all, cases):
        for (name, way), found in zip(ways, runs, strict=True):
            _assert_equal(found, alone(name), f"{name}: {way}")
            most = 1 - 1 / way["pipeline"]  # one rank after the other
            assert all(0 < record.bubble < most for record in found)
            assert {len(record.memory_by_stage) for record in found} == {way["pipeline"]}


@MATRIX
@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_optimizers_and_bf16_learn_the_same_in_stages(
    optimizer: str, recipes: dict[str, Any]
) -> None:
    recipe = {**recipes["gpt2"], "steps": 10, "optimizer": {"name": optimizer, "lr": 1e-3}}
    low = {**recipes["gpt2"], "steps": 10, "precision": "bf16"}
    exact, rounded = run_ranks(1, train_all, [recipe, low])[0]
    cases = [{**values, "parallel": INTERLEAVED} for values in (recipe, low)]
    for found, found_low in run_fresh_ranks(4, train_all, cases):
        _assert_equal(found, exact, optimizer)
        losses = [[record.loss for record in run] for run in (found_low, rounded)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "world_size", "layouts"),
    [
        ("tied llama", 2, [{}, PIPELINE, INTERLEAVED]),
        *(
            (name, 4, [{}, PIPELINE, CUBE, INTERLEAVED, {"tensor": 2}])
            for name in ("tied llama", "bert", "modernbert")
        ),
    ],
)
def test_checkpoints_go_on_in_any_layout(
    name: str,
    world_size: int,
    layouts: list[dict[str, Any]],
    tmp_path: Path,
    recipes: dict[str, Any],
    alone: Callable[[str], list[Any]],
) -> None:
    recipe, url = recipes[name], str(tmp_path / "checkpoints")
    for run in run_fresh_ranks(world_size, travel, recipe, layouts, url):
        records = [record for part, _ in run for record in part]
        _assert_equal(records, alone(name), "from layout to layout")
    ((last, evaluated),) = run_ranks(1, travel, recipe, [{}], str(tmp_path / "one"))[0]
    assert run[-1][1].terms == pytest.approx(evaluated.terms, rel=RELATIVE)
    assert last[-1].step == STEPS

    saved = dict(ModelTensors(Storage(url), list_commits(Storage(url))[0]))
    manifest = find_training_data(Recipe.model_validate(recipe)).train.manifest
    workload = Recipe.model_validate(recipe).workload
    plain = workload.build_model(manifest.vocabulary, manifest.seq_len).state_dict()
    assert {name: v.shape for name, v in saved.items()} == {n: v.shape for n, v in plain.items()}
    assert all(torch.isfinite(value).all() for value in saved.values())


def test_the_ranks_of_a_pipeline_share_their_samples_and_count_them_once() -> None:
    places = [data_rank(rank, 12, 2, 3) for rank in range(12)]
    assert [place.rank for place in places] == [0, 0, 1, 1] * 3
    assert [place.is_primary for place in places] == [True, False, True, False] + [False] * 8
    with pytest.raises(ValueError, match="10 ranks in groups of 6"):
        data_rank(0, 10, 2, 3)
