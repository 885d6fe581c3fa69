"""Ranks that compute every sample together learn what one process learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import tiny_recipe, write_data_set
from support.tensor_ranks import train_all

RELATIVE = 1e-5
"""As in `test_step.py`: fp32 sums in another order."""
STEPS = 20
TENSOR = {"tensor": 2}
SEQUENCE = {"tensor": 2, "sequence": True}
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 48, "dropout": 0.1}
LLAMA = {
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "bias": False,
    "tied_embeddings": False,
    "num_kv_heads": 2,
    "intermediate_size": 48,
}
EVEN = {"embedding_multiple": 2}
"""The vocabulary has 97 ids: with a row more, two ranks can divide the table."""
WORKLOADS = {
    "bert": {"name": "bert", **SIZES, **EVEN, "next_sentence": True},
    "gpt2": {"name": "gpt", **SIZES, **EVEN},
    "gpt2, whole table": {"name": "gpt", **SIZES},
    "llama": {"name": "gpt", **SIZES, **LLAMA, **EVEN},
    "llama, tied, whole table": {"name": "gpt", **SIZES, **LLAMA, "tied_embeddings": True},
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One for each workload."""
    folder: Path = tmp_path_factory.mktemp("data")
    plain, pairs = folder / "plain", folder / "pairs"
    write_data_set(plain, samples=150)
    write_data_set(pairs, samples=150, pairs=True)
    return {
        name: tiny_recipe(
            pairs if workload["name"] == "bert" else plain,
            folder / "runs",
            workload=workload,
            steps=STEPS,
            batch_size=9,
        )
        for name, workload in WORKLOADS.items()
    }


def _each_way(recipes: dict[str, Any], *ways: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{name}, {way}": {**recipe, "parallel": way}
        for name, recipe in recipes.items()
        for way in ways
    }


@pytest.fixture(scope="module")
def alone(recipes: dict[str, Any]) -> dict[str, list[Any]]:
    """The records of one process."""
    return dict(zip(recipes, run_ranks(1, train_all, list(recipes.values()))[0], strict=True))


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(2, [{}]), (2, [TENSOR, SEQUENCE]), (4, [TENSOR, SEQUENCE])],
    ids=["dp2", "tp2", "dp2 tp2"],
)
def test_losses_are_equal_however_the_model_is_divided(
    world_size: int, ways: list[dict[str, Any]], recipes: dict[str, Any], alone: dict[str, Any]
) -> None:
    cases = _each_way(recipes, *ways)
    for records in run_fresh_ranks(world_size, train_all, list(cases.values())):
        for (name, recipe), found in zip(cases.items(), records, strict=True):
            wanted = next(alone[key] for key in recipes if recipes[key]["workload"] is recipe["workload"])
            assert [r.digest for r in found] == [r.digest for r in wanted]
            assert [r.tokens for r in found] == [r.tokens for r in wanted]
            for key in ("loss", "gradient_norm"):
                one, other = ([getattr(r, key) for r in run] for run in (found, wanted))
                error = max(abs(a / b - 1) for a, b in zip(one, other, strict=True))
                print(name, key, world_size, error, max(abs(r.terms[k]/w.terms[k]-1) for r,w in zip(found,wanted) for k in r.terms))
