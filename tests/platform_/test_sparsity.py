"""Weights held at zero: the same ones at any number of ranks and in any layout, and at zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks import run_fresh_ranks, run_ranks
from support.sparse_ranks import Sparse, resume_sparse, save_sparse, train_all_sparse, train_sparse
from support.synthetic import MODERNBERT, tiny_recipe, write_data_set

RELATIVE = 1e-5
"""As in `test_step.py`: fp32 sums in another order."""
STEPS = 9
SIZES = {"hidden_size": 44, "num_layers": 2, "num_heads": 2, "max_positions": 48, "dropout": 0.1}
"""Over three ranks FSDP2 divides 44 rows into 15, 15 and 14."""
ODD = {"workload": {"name": "gpt", **SIZES, "hidden_size": 34}}
"""Two ranks that compute together have 17 rows each, and FSDP2 divides these into 9 and 8."""
BERT, GPT = ({"workload": {"name": name, **SIZES}} for name in ("bert", "gpt"))
MODERN = {"workload": {**MODERNBERT, "hidden_size": 44}}
EXACT = {
    "parallel": {"virtual_ranks": 4},
    "optimizer": {"lr": 5e-3, "fused": False},
}
"""No bit of a gradient depends on the number of ranks."""
STATIC = {"level": 0.75, "distribution": "erdos_renyi"}
RIGL = {"method": "rigl", "level": 0.8, "schedule": {"every": 2, "fraction": 0.4}, "until": 0.9}
METHODS: dict[str, dict[str, Any]] = {
    "static": STATIC,
    "block": {"method": "block", "level": 0.5, "block": 22},
    "two_four": {"method": "two_four", "layers": ["*.query", "*.down"]},
    "rigl": RIGL,
}
PHASES = [{"sparsity": {"level": 0.9}}, {"sparsity": {"level": 0.5}}, {"sparsity": None}]
"""Each of three steps; the second has four weights of nine that are freed, the third the rest."""
OPTIMIZERS = {
    "adamw": {"lr": 5e-3},
    "lamb": {"name": "lamb", "lr": 5e-3},
    "muon": {"name": "muon", "lr": 5e-3},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    write_data_set(folder / "data", samples=150)
    return folder


def _recipe(data: Path, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        **GPT,
        "steps": STEPS,
        "batch_size": 9,
        "micro_batch_tokens": 512,
        "optimizer": {"lr": 5e-3, "weight_decay": 0.1},
    }
    return tiny_recipe(data / "data", data / "runs", **common | changes)


def _methods(data: Path) -> list[dict[str, Any]]:
    return [
        _recipe(
            data,
            **EXACT,
            sparsity=method,
            steps=STEPS if name == "rigl" else 3,  # masks of others stay
            **(BERT if name == "static" else GPT),
        )
        for name, method in METHODS.items()
    ]


@pytest.mark.parametrize(
    "name",
    ["rigl", *(pytest.param(name, marks=pytest.mark.matrix) for name in METHODS if name != "rigl")],
)
def test_modernbert_has_the_same_zeros_on_any_number_of_ranks(data: Path, name: str) -> None:
    recipe = _recipe(data, **EXACT, **MODERN, sparsity=METHODS[name], steps=5)
    alone = run_ranks(1, train_sparse, recipe)[0]
    assert len(alone.masks) == (3 if name == "rigl" else 1)
    assert all(np.array_equal(alone.zeros[key], mask) for key, mask in alone.masks[-1].items())
    for found in run_ranks(3, train_sparse, recipe):
        _assert_equal(found, alone, relative=0.0)


def _assert_equal(found: Sparse, wanted: Sparse, relative: float = RELATIVE) -> None:
    for one, other in zip(found.masks, wanted.masks, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in other)
    for name, zeros in wanted.zeros.items():
        assert np.array_equal(found.zeros[name], zeros), name
    for key in ("loss", "gradient_norm"):
        values, right = ([getattr(r, key) for r in run.records] for run in (found, wanted))
        assert values == pytest.approx(right, rel=relative), key


@pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 4), marks=pytest.mark.matrix)])
def test_every_method_is_the_same_on_any_number_of_ranks(
    data: Path, sizes: tuple[int, ...]
) -> None:
    """With the same sums to the bit, RigL replaces the same weights; all ranks look after every
    step whether weights, gradients and running means are exactly zero."""
    recipes = _methods(data)
    alone = run_ranks(1, train_all_sparse, recipes)[0]
    for size in sizes:
        for found in run_ranks(size, train_all_sparse, recipes):
            for one, other in zip(found, alone, strict=True):
                _assert_equal(one, other, relative=0.0)
    for run, (name, method) in zip(alone, METHODS.items(), strict=True):
        masks = run.masks[-1]
        zeros = sum(mask.sum() for mask in masks.values()) / sum(m.size for m in masks.values())
        assert zeros == pytest.approx(method.get("level", 0.5), abs=1e-3), name
        assert len(run.masks) == (5 if name == "rigl" else 1)
        assert all(np.array_equal(run.zeros[key], mask) for key, mask in masks.items()), name
        assert not any(zeros.any() for key, zeros in run.zeros.items() if key not in masks), name
    assert set(alone[2].masks[0]) == {
        f"blocks.{n}.{layer}.weight"
        for n in (0, 1)
        for layer in ("attention.query", "feed_forward.down")
    }


def test_rigl_replaces_weights_and_keeps_their_number(data: Path) -> None:
    run = run_ranks(1, train_sparse, _recipe(data, sparsity=RIGL))[0]
    shares = []
    for before, after in zip(run.masks[:-1], run.masks[1:], strict=True):
        gone = sum(int((after[name] & ~before[name]).sum()) for name in before)
        come = sum(int((before[name] & ~after[name]).sum()) for name in before)
        assert gone == come
        shares.append(gone)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 3 * shares[-2] > shares[-1]
    assert [record.step for record in run.records if record.layer_sparsity] == [1, 2, 4, 6, 8]
    for record in run.records:
        assert all(
            share == pytest.approx(0.8, abs=1e-3) for share in record.layer_sparsity.values()
        )


@pytest.mark.parametrize(
    ("workload", "layout"),
    [
        (BERT, {"replicate": 2}),
        pytest.param(ODD, {"tensor": 2}, marks=pytest.mark.matrix),
        pytest.param(MODERN, {"replicate": 2}, marks=pytest.mark.matrix),
        pytest.param(MODERN, {"tensor": 2, "sequence": True}, marks=pytest.mark.matrix),
    ],
)
def test_masks_are_the_same_in_other_layouts(
    data: Path, workload: dict[str, Any], layout: dict[str, Any]
) -> None:
    recipe = _recipe(data, sparsity=STATIC, **workload)
    alone = run_ranks(1, train_sparse, recipe)[0]
    for found in run_fresh_ranks(4, train_sparse, {**recipe, "parallel": layout}):
        _assert_equal(found, alone)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["block", "two_four", "rigl"])
def test_other_methods_where_ranks_compute_together(data: Path, name: str) -> None:
    recipe = _recipe(data, sparsity=METHODS[name])
    alone = run_ranks(1, train_sparse, recipe)[0]
    layout = {"tensor": 2, "sequence": True}
    found = run_fresh_ranks(4, train_sparse, {**recipe, "parallel": layout})[0]
    if name == "rigl":  # a rounding error may decide between two weights; the start is the same
        assert all(
            np.array_equal(found.masks[0][key], mask) for key, mask in alone.masks[0].items()
        )
    else:
        _assert_equal(found, alone)


@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("adamw", "lamb"))]
)
def test_level_after_level_down_to_none(data: Path, name: str) -> None:
    """Zeros of a lower level are zeros of the higher one; what is freed starts from nothing."""
    phases = [{**phase, "steps": 3} for phase in PHASES]
    recipe = _recipe(data, optimizer=OPTIMIZERS[name], phases=phases)
    alone = run_ranks(1, train_sparse, recipe)[0]
    high, low = alone.masks
    shares = [sum(m.sum() for m in one.values()) / sum(m.size for m in one.values())
              for one in (high, low)]  # fmt: skip
    assert shares == pytest.approx([0.9, 0.5], abs=1e-3)
    assert all((high[key] | ~low[key]).all() for key in low)
    assert {name: zeros.sum() for name, zeros in alone.zeros.items() if zeros.any()} == {}
    tolerance = 1e-4 if name == "muon" else RELATIVE
    for size in (2, 3):
        for found in run_ranks(size, train_sparse, recipe):
            _assert_equal(found, alone, tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("at", [5, 6])
def test_a_checkpoint_goes_on_at_another_size(data: Path, tmp_path: Path, at: int) -> None:
    """At the end of a phase of RigL, and in its middle; another phase of it comes after."""
    phases = [
        {"steps": 6, "sparsity": RIGL},
        {"steps": 6, "sparsity": {**RIGL, "level": 0.5}},
        {"steps": 2, "sparsity": {"level": 0.3}},
    ]
    recipe = _recipe(data, **EXACT, phases=phases)
    wanted = run_ranks(2, save_sparse, recipe, str(tmp_path), at)[0]
    alone = run_ranks(1, train_sparse, recipe)[0]
    assert [r.loss for r in wanted.records] == [r.loss for r in alone.records[at:]]
    for size in (1, 3, 4):
        _assert_equal(run_ranks(size, resume_sparse, recipe, str(tmp_path))[0], wanted, 0.0)


def test_a_dense_step_on_the_same_weights_has_a_larger_gradient(data: Path) -> None:
    """What is not in the norm is there: the same weights without masks have it."""
    sparse = run_ranks(1, train_sparse, _recipe(data, sparsity={"level": 0.5}))[0]
    dense = _recipe(data, sparsity=None, phases=[{"steps": 1, "sparsity": {"level": 0.5}}, {}])
    one = run_ranks(1, train_sparse, dense)[0]
    assert one.records[0].gradient_norm == sparse.records[0].gradient_norm
    assert one.records[1].loss == sparse.records[1].loss
    assert one.records[1].gradient_norm > 1.01 * sparse.records[1].gradient_norm
