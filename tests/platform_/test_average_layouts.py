"""The average of the weights in every layout, and from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.state import ModelTensors
from elastrata.step.average import AVERAGE
from elastrata_pipelines.storage import Storage
from support.average_layouts import STEPS, go_on_averaging
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import tiny_recipe, write_data_set

Layout = tuple[int, dict[str, Any]]
"""Workers, and how they divide the model."""
SIZES = {"hidden_size": 24, "num_layers": 4, "num_heads": 2, "max_positions": 48}
WORKLOADS = {
    "gpt": {"name": "gpt", **SIZES, "embedding_multiple": 2},  # the table is tied to the head
    "bert": {"name": "bert", **SIZES, "embedding_multiple": 2},
}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""fp32 sums in another order, over some steps of AdamW."""
TENSOR, PIPELINE = {"tensor": 2}, {"pipeline": 2}
TURNS = {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}
MATRIX = pytest.mark.matrix


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("average")
    write_data_set(folder / "data", samples=300, held_out=40)
    return folder


def _averaged(folder: Path, url: Path, name: str, layouts: Sequence[Layout]) -> list[float]:
    """The average's held-out loss after some steps in each layout, each of which goes on from what
    the one before has saved, every second time as copies in memory are."""
    losses = []
    for number, (workers, parallel) in enumerate(layouts):
        recipe = tiny_recipe(
            folder / "data",
            folder / "runs",
            workload=WORKLOADS[name],
            steps=STEPS * len(layouts),
            average={"decay": 0.8, "evaluated": True},
            evaluation={"samples": 32},
            parallel=parallel,
            workers={"min": workers, "max": workers, "cpus": 0.4, "threads": 1, "spares": False},
        )
        run = run_fresh_ranks if parallel else run_ranks
        found = run(workers, go_on_averaging, recipe, str(url), number % 2 == 0)
        assert found == pytest.approx([found[0]] * workers, rel=1e-6)
        losses.append(found[0])
    return losses


def _newest(url: Path) -> dict[str, Tensor]:
    storage = Storage(str(url))
    return dict(ModelTensors(storage, list_commits(storage)[0], AVERAGE))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("gpt", [(2, TENSOR), (2, PIPELINE), (3, {})], id="gpt"),
        pytest.param("bert", [(2, PIPELINE), (2, TENSOR), (1, {})], id="bert", marks=MATRIX),
        pytest.param(
            "gpt",
            [(4, {**PIPELINE, **TENSOR}), (4, {"replicate": 2}), (2, TURNS), (2, {})],
            id="gpt at 4",
            marks=MATRIX,
        ),
        pytest.param(
            "bert",
            [(4, {**TENSOR, "sequence": True}), (4, {"replicate": "all"}), (1, {}), (4, TURNS)],
            id="bert at 4",
            marks=MATRIX,
        ),
    ],
)
def test_it_is_that_of_one_process_whatever_the_layouts(
    name: str, layouts: list[Layout], folder: Path, tmp_path: Path
) -> None:
    found = _averaged(folder, tmp_path / "divided", name, layouts)
    expected = _averaged(folder, tmp_path / "alone", name, [(1, {})] * len(layouts))
    assert found == pytest.approx(expected, rel=1e-5)
    averages, alone = _newest(tmp_path / "divided"), _newest(tmp_path / "alone")
    assert averages.keys() == alone.keys()
    for key, average in alone.items():
        torch.testing.assert_close(averages[key], average, **CLOSE)
