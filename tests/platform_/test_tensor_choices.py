"""What a recipe may choose goes with a model that ranks compute together, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import tiny_recipe, write_data_set
from support.tensor_ranks import resume_all, save_all, train_all

STEPS, SAVED_AT = 20, 10
SIZES = {"hidden_size": 36, "num_layers": 2, "max_positions": 48, "embedding_multiple": 2}
"""Two ranks get 18 rows of a matrix each, and two of them 9 of these."""
BERT = {"name": "bert", **SIZES, "num_heads": 2}
GPT2 = {"name": "gpt", **SIZES, "num_heads": 2}
LLAMA = {
    "name": "gpt",
    **SIZES,
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "bias": False,
    "num_heads": 6,
    "num_kv_heads": 2,
    "intermediate_size": 42,
    "tied_embeddings": False,
}
"""Of 42 rows two ranks get 21 each, and two of them 11 and 10 of these."""
CLIP = {"method": "bucketwise", "max_norm": 0.3}
CHOICES: dict[str, dict[str, Any]] = {
    "lamb": {"workload": BERT, "optimizer": {"name": "lamb", "lr": 2e-2}, "clip": CLIP},
    "muon": {
        "workload": LLAMA,
        "optimizer": {"name": "muon", "lr": 2e-3},
        "activation_checkpointing": "selective",
    },
    "bucketwise": {"workload": GPT2, "clip": CLIP, "activation_checkpointing": "selective"},
}
RELATIVE = {"lamb": 1e-5, "muon": 1e-4, "bucketwise": 1e-5}
"""fp32 sums in another order; Newton-Schulz enlarges what is small, see `test_optimizer_ranks.py`.
"""
TENSOR, SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence": True}
HYBRID = {**SEQUENCE, "replicate": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp4": (4, {}),
    "tp2": (2, SEQUENCE),
}
"""World size, and the section `parallel`, beside dp2 tp2."""
pytestmark = pytest.mark.matrix  # `test_tensor_parallel.py` has a quick one


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    common: dict[str, Any] = {"steps": STEPS, "batch_size": 9, "micro_batch_tokens": 96}
    return {
        name: tiny_recipe(folder, folder / "runs", **common | choice)
        for name, choice in CHOICES.items()
    }


@pytest.fixture(scope="module")
def alone(recipes: dict[str, Any]) -> dict[str, list[Any]]:
    """The records of one process."""
    return dict(zip(recipes, run_ranks(1, train_all, list(recipes.values()))[0], strict=True))


def _assert_equal(found: list[Any], wanted: list[Any], relative: float, case: str) -> None:
    assert [r.digest for r in found] == [r.digest for r in wanted], case
    for name in ("loss", "gradient_norm"):
        values, right = ([getattr(record, name) for record in run] for run in (found, wanted))
        assert values == pytest.approx(right, rel=relative), f"{case}: {name}"


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        pytest.param(2, [SEQUENCE], id="tp2"),
        pytest.param(2, [TENSOR], id="tp2 without sequence"),
        pytest.param(4, [SEQUENCE], id="dp2 tp2"),
        (4, [TENSOR, HYBRID, {**SEQUENCE, "overlap_on_cpu": True}]),
        pytest.param(8, [HYBRID], id="2 copies of dp2 tp2"),
    ],
)
def test_optimizers_and_clips_learn_what_one_process_learns(
    world_size: int, ways: list[dict[str, Any]], recipes: dict[str, Any], alone: dict[str, Any]
) -> None:
    cases = [
        (name, {**recipe, "parallel": way})
        for name, recipe in recipes.items()
        for way in ways
        if not (way.get("overlap_on_cpu") and "clip" in recipe)
    ]
    ranks = run_fresh_ranks(world_size, train_all, [recipe for _, recipe in cases])
    for runs in ranks:
        for (name, recipe), found in zip(cases, runs, strict=True):
            _assert_equal(found, alone[name], RELATIVE[name], f"{name}: {recipe['parallel']}")


@pytest.mark.parametrize("groups", [1, 2])
def test_parts_are_clipped_alike_however_the_model_is_divided(
    groups: int, recipes: dict[str, Any]
) -> None:
    """`scope: local` depends on the number of groups that have samples of their own."""
    local = {**recipes["bucketwise"], "clip": {**CLIP, "scope": "local"}}
    (wanted,) = run_fresh_ranks(groups, train_all, [local])[0]
    ways = [{**local, "parallel": way} for way in (TENSOR, SEQUENCE)]
    for runs in run_fresh_ranks(2 * groups, train_all, ways):
        for found in runs:
            _assert_equal(found, wanted, RELATIVE["bucketwise"], f"{groups} groups")


def test_with_virtual_ranks_no_bit_depends_on_the_number_of_groups(recipes: dict[str, Any]) -> None:
    recipe = {
        **recipes["bucketwise"],
        "optimizer": {"lr": 1e-2, "fused": False},
        "clip": {"max_norm": 0.5},
        "parallel": {**SEQUENCE, "virtual_ranks": 4},
    }
    alone, two = (
        [(r.loss, r.gradient_norm) for r in run_fresh_ranks(size, train_all, [recipe])[0][0]]
        for size in (2, 4)
    )
    assert two == alone


@pytest.mark.parametrize(("world_size", "way"), LAYOUTS.values(), ids=LAYOUTS)
def test_checkpoints_go_on_in_another_layout_and_back(
    world_size: int,
    way: dict[str, Any],
    tmp_path: Path,
    recipes: dict[str, Any],
    alone: dict[str, Any],
) -> None:
    names = ["lamb", "muon"]
    urls = {name: str(tmp_path / name) for name in names}
    back = {name: str(tmp_path / f"{name} back") for name in names}
    here = {name: {**recipes[name], "parallel": way} for name in names}
    divided = {name: {**recipes[name], "parallel": TENSOR} for name in names}
    run_fresh_ranks(world_size, save_all, [(here[n], urls[n]) for n in names], SAVED_AT)
    run_fresh_ranks(4, save_all, [(divided[n], back[n]) for n in names], SAVED_AT)
    onto = run_fresh_ranks(4, resume_all, [(divided[n], urls[n]) for n in names])
    onto += run_fresh_ranks(world_size, resume_all, [(here[n], back[n]) for n in names])
    for found in onto:
        for name, (records, _) in zip(names, found, strict=True):
            _assert_equal(records, alone[name][SAVED_AT:], RELATIVE[name], name)
