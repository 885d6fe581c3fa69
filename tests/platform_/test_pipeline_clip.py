"""Clipping by bucket in the stages of a pipeline, and of weights held at zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.pipeline_ranks import train_clipped
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import tiny_recipe, write_data_set

RELATIVE = 1e-5
"""As in `test_step.py`: fp32 sums in another order."""
MAX_NORM = 0.3
SIZES = {"hidden_size": 24, "num_layers": 5, "num_heads": 2, "max_positions": 48}
PIPELINE = {"pipeline": 2}
INTERLEAVED = {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}
RIGL = {"method": "rigl", "level": 0.6, "schedule": {"every": 3}, "until": 0.5}
REDUCED, LOCAL = ({"method": "bucketwise", "max_norm": MAX_NORM, "scope": scope}
                  for scope in ("reduced", "local"))  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "tied": {"clip": REDUCED},
    "untied": {
        "clip": REDUCED,
        "workload": {"name": "gpt", **SIZES, "tied_embeddings": False, "norm": "rms"},
    },
    "sparse": {"clip": REDUCED, "sparsity": RIGL},
    "local": {"clip": LOCAL},
}
WAYS = {"tied": PIPELINE, "untied": INTERLEAVED, "sparse": INTERLEAVED, "local": PIPELINE}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("data")
    write_data_set(folder / "data", samples=150)
    common: dict[str, Any] = {
        "steps": 6,
        "batch_size": 13,
        "micro_batch_tokens": 64,
        "workload": {"name": "gpt", **SIZES},
    }
    return {
        name: tiny_recipe(folder / "data", folder / "runs", **common | changes)
        for name, changes in RUNS.items()
    }


@pytest.mark.matrix
@pytest.mark.parametrize("names", [("tied", "sparse"), ("untied", "local")])
def test_buckets_of_stages_are_clipped_as_those_of_the_whole_model(
    names: tuple[str, ...], recipes: dict[str, Any]
) -> None:
    """Also a tied embedding, which is in no stage alone. With one data rank its part is the sum, so
    `local` is the same as well."""
    alone = run_ranks(1, train_clipped, [recipes[name] for name in names])[0]
    cases = [{**recipes[name], "parallel": WAYS[name]} for name in names]
    for ranks in run_fresh_ranks(2, train_clipped, cases):
        for name, (records, left), (wanted, wanted_left) in zip(names, ranks, alone, strict=True):
            for one, other in zip(records, wanted, strict=True):
                assert one.loss == pytest.approx(other.loss, rel=RELATIVE), name
                assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=RELATIVE), name
            assert left == pytest.approx(wanted_left, rel=RELATIVE), name
            assert all(norm <= MAX_NORM for norm in left), name
            assert any(one.gradient_norm > MAX_NORM for one in records) == (name != "local"), name


def test_gradients_of_weights_at_zero_count_in_no_bucket(recipes: dict[str, Any]) -> None:
    """On two ranks as on one; the same weights without masks have a larger gradient."""
    sparse = recipes["sparse"]
    dense = {**sparse, "sparsity": None}
    masked = [{"steps": 1, "sparsity": {"level": 0.6}}, {"steps": 5}]
    cases = [sparse, {**dense, "phases": masked}, {**sparse, "sparsity": {"level": 0.6}}]
    (records, left), (freed, _), (static, _) = run_ranks(1, train_clipped, cases)[0]
    assert freed[1].loss == static[1].loss
    assert freed[1].gradient_norm > 1.005 * static[1].gradient_norm
    for found, found_left in (ranks[0] for ranks in run_ranks(2, train_clipped, [sparse])):
        losses = [[record.loss for record in run] for run in (found, records)]
        assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
        assert found_left == pytest.approx(left, rel=RELATIVE)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_stages_whose_matrices_are_divided_and_sparse_are_clipped_alike(
    name: str, recipes: dict[str, Any]
) -> None:
    sizes = {"name": name, **SIZES, "dropout": 0.1, "embedding_multiple": 2}
    recipe = {**recipes["tied"], "workload": sizes, "sparsity": {"level": 0.5}, "steps": 3}
    ((wanted, wanted_left),) = run_ranks(1, train_clipped, [recipe])[0]
    way = {"pipeline": 2, "tensor": 2, "sequence": True}
    for ((records, left),) in run_fresh_ranks(4, train_clipped, [{**recipe, "parallel": way}]):
        found = [record.gradient_norm for record in records]
        assert found == pytest.approx([r.gradient_norm for r in wanted], rel=RELATIVE)
        assert [r.loss for r in records] == pytest.approx([r.loss for r in wanted], rel=RELATIVE)
        assert left == pytest.approx(wanted_left, rel=RELATIVE)


@pytest.mark.matrix
def test_parts_of_stages_are_clipped_within_the_bound(recipes: dict[str, Any]) -> None:
    cases = [
        {**recipes[name], "clip": LOCAL, "parallel": WAYS[name]} for name in ("tied", "untied")
    ]
    for ranks in run_fresh_ranks(4, train_clipped, cases):
        for records, left in ranks:
            assert all(0.01 < norm <= MAX_NORM for norm in left)
            found = [record.gradient_norm for record in records]
            assert found == pytest.approx(left, rel=RELATIVE)
