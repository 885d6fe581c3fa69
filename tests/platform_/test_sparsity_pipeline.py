"""Weights held at zero in the stages of a pipeline: the same ones as in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks import run_fresh_ranks, run_ranks
from support.sparse_ranks import Sparse, resume_sparse, save_sparse, train_all_sparse
from support.synthetic import MODERNBERT, tiny_recipe, write_data_set

RELATIVE = 1e-5
"""As in `test_step.py`: fp32 sums in another order."""
SIZES = {"hidden_size": 34, "num_layers": 4, "num_heads": 2, "max_positions": 48, "dropout": 0.1}
PIPELINE = {"pipeline": 2}
INTERLEAVED = {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}
RIGL = {"method": "rigl", "level": 0.8, "schedule": {"every": 2, "fraction": 0.4}, "until": 0.5}
"""Masks stay from the middle of a phase on."""
LEVELS = [
    {"steps": 3, "sparsity": {"level": 0.9, "distribution": "erdos_renyi"}},
    {"steps": 3, "sparsity": {**RIGL, "level": 0.5, "layers": ["*.3.*.query"]}},
    {"steps": 2, "sparsity": {"method": "block", "block": 2, "level": 0.3}},
    {"steps": 2, "sparsity": None},
]
"""In the second one only the last stage has weights at zero."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    write_data_set(folder / "data", samples=150)
    return folder


def _recipe(data: Path, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "workload": {"name": "gpt", **SIZES},
        "steps": 8,
        "batch_size": 9,
        "micro_batch_tokens": 64,
        "optimizer": {"lr": 5e-3, "weight_decay": 0.1},
    }
    return tiny_recipe(data / "data", data / "runs", **common | changes)


def _joined(ranks: Sequence[Sparse]) -> Sparse:
    """What the ranks of a pipeline have between them."""
    changes = zip(*(rank.masks for rank in ranks), strict=True)
    return replace(
        ranks[0],
        zeros={name: zeros for rank in ranks for name, zeros in rank.zeros.items()},
        masks=[{name: mask for part in parts for name, mask in part.items()} for parts in changes],
    )


def _assert_equal(found: Sparse, wanted: Sparse) -> None:
    for one, other in zip(found.masks, wanted.masks, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in other)
    assert found.zeros.keys() == wanted.zeros.keys()
    assert all(np.array_equal(found.zeros[name], wanted.zeros[name]) for name in wanted.zeros)
    for one, other in zip(found.records, wanted.records, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=RELATIVE)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=RELATIVE)
        assert one.flops_of_zeros == other.flops_of_zeros
        assert one.layer_sparsity == other.layer_sparsity
        assert list(one.layer_sparsity) == list(other.layer_sparsity)


@pytest.mark.matrix
def test_stages_hold_the_same_weights_at_zero(data: Path) -> None:
    """Every rank looks after every step at its weights, gradients and running means."""
    cases = [
        _recipe(data, sparsity={"level": 0.75}),
        _recipe(data, sparsity={"method": "two_four", "layers": ["*.query", "*.down"]}),
        _recipe(data, phases=LEVELS, optimizer={"name": "muon", "lr": 5e-3}),
        _recipe(data, sparsity={"level": 0.75}, workload=MODERNBERT),
    ]
    ways = [PIPELINE, INTERLEAVED, INTERLEAVED, INTERLEAVED]
    alone = run_ranks(1, train_all_sparse, cases)[0]
    staged = [{**case, "parallel": way} for case, way in zip(cases, ways, strict=True)]
    for wanted, *ranks in zip(alone, *run_fresh_ranks(2, train_all_sparse, staged), strict=True):
        for other in ranks:
            assert other.records[-1].layer_sparsity == ranks[0].records[-1].layer_sparsity
        _assert_equal(_joined(ranks), wanted)


@pytest.mark.matrix
def test_masks_of_stages_go_on_in_any_layout(data: Path, tmp_path: Path) -> None:
    """RigL moves weights in stages; its masks then go on whole, and back into other stages."""
    recipe = _recipe(data, sparsity=RIGL)
    first = {**recipe, "parallel": PIPELINE}
    wanted = _joined(run_fresh_ranks(2, save_sparse, first, str(tmp_path), 5))
    zeros = sum(mask.sum() for mask in wanted.masks[0].values())
    assert zeros == pytest.approx(0.8 * sum(m.size for m in wanted.masks[0].values()), abs=20)
    alone = run_ranks(1, resume_sparse, recipe, str(tmp_path))[0]
    _assert_equal(alone, replace(wanted, masks=alone.masks))
    again = {**recipe, "parallel": INTERLEAVED}
    _assert_equal(_joined(run_fresh_ranks(2, resume_sparse, again, str(tmp_path))), alone)
    for name, mask in wanted.masks[0].items():
        assert np.array_equal(alone.masks[0][name], mask)


def test_rigl_in_stages_begins_with_the_same_weights_and_moves_as_many(data: Path) -> None:
    """A rounding error may decide between two weights, so few may differ in the end."""
    recipe = _recipe(data, sparsity=RIGL)
    alone = run_ranks(1, train_all_sparse, [recipe])[0][0]
    ranks = run_fresh_ranks(2, train_all_sparse, [{**recipe, "parallel": PIPELINE}])
    found = _joined([rank[0] for rank in ranks])
    assert len(found.masks) == len(alone.masks) == 2
    assert all(np.array_equal(found.masks[0][name], mask) for name, mask in alone.masks[0].items())
    for name, mask in alone.masks[1].items():
        assert mask.sum() == found.masks[1][name].sum()
        assert (mask == found.masks[1][name]).mean() > 0.99, name
        assert (mask != alone.masks[0][name]).any(), name
