"""A run with weights at zero through Ray: killed, resized, recorded, exported, taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import yaml
from safetensors.torch import load_file

from elastrata.checkpoints.commit import list_commits
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.sparsity.layers import layer_shapes
from elastrata.sparsity.mask_file import MASKS_FILE, read_masks
from elastrata_pipelines.storage import Storage
from support.command import kill_group, run_json, start, wait_until
from support.synthetic import tiny_recipe, write_data_set

RIGL = {"method": "rigl", "level": 0.8, "schedule": {"every": 4, "fraction": 0.4}, "until": 1.0}
PHASES = [
    {"steps": 40, "sparsity": RIGL},
    {"steps": 20, "sparsity": {"level": 0.5}},
    {"steps": 20, "sparsity": None, "schedule": {"warmup_steps": 5}},
]
STEPS = 80
QUERY = "blocks.0.attention.query"

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a data set and two recipes: `phases.yaml`, and its first phase, `sparse.yaml`."""
    folder = tmp_path_factory.mktemp("sparse")
    write_data_set(folder / "data", samples=400)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        workload={"name": "gpt", "hidden_size": 36, "num_layers": 2, "num_heads": 2},
        optimizer={"lr": 2e-3, "fused": False},
        parallel={"virtual_ranks": 2},
        checkpoint={"every": 10, "hot_steps": 4},
    )
    (folder / "phases.yaml").write_text(
        yaml.safe_dump({**values, "phases": PHASES}), encoding="utf-8"
    )
    (folder / "sparse.yaml").write_text(
        yaml.safe_dump({**values, **PHASES[0], "steps": 10}), encoding="utf-8"
    )
    return folder


def _steps(run: Path) -> list[Any]:
    return history.effective_steps(history.read_entries(Storage(str(run / "history"))))


def test_a_killed_and_resized_run_is_the_undisturbed_one(folder: Path) -> None:
    recipe, runs = folder / "phases.yaml", folder / "runs"
    run_json("train", recipe, "--name", "undisturbed")
    expected = _steps(runs / "undisturbed")
    two = ("workers.min=2", "workers.max=2")
    killed = start("train", recipe, *two, "--name", "killed", log=folder / "log")
    checkpoints = Storage(str(runs / "killed" / "checkpoints"))
    wait_until(lambda: any(c.step >= 20 for c in list_commits(checkpoints)), 300, "twenty steps")
    kill_group(killed)
    done = run_json("train", recipe, "--name", "killed")
    assert done["world_sizes"] == [2, 1]
    steps = _steps(runs / "killed")
    assert len(steps) == STEPS
    for key in ("digest", "loss", "gradient_norm", "flops", "flops_of_zeros"):
        assert [step[key] for step in steps] == [step[key] for step in expected], key
    assert expected[-1]["loss"] < expected[0]["loss"]

    told = {step["step"]: step["layer_sparsity"][QUERY] for step in expected
            if step["layer_sparsity"]}  # fmt: skip
    assert list(told) == [1, *range(4, 40, 4), 41, 61][: len(told)]
    assert [told[step] for step in (1, 36, 41)] == pytest.approx([0.8, 0.8, 0.5], abs=1e-3)

    client = mlflow.MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")

    def metric(name: str) -> list[tuple[int, float]]:
        found = client.get_metric_history(done["mlflow_run_id"], name)
        return sorted((one.step, one.value) for one in found)

    assert dict(metric(f"sparsity/{QUERY}"))[41] == pytest.approx(0.5, abs=1e-3)
    dense, needed = dict(metric("flops/dense")), dict(metric("flops/needed"))
    assert list(dense) == list(needed) == [40, 60, 80]
    assert dense[40] == sum(step["flops"] for step in expected[:40])
    assert dense[40] / needed[40] > dense[60] / needed[60] > dense[80] / needed[80] == 1
    pictures = {path.name for path in (runs / "killed" / "plots").iterdir()}
    assert pictures >= {"sparsity.png", "flops.png"}


def test_masks_leave_with_the_model_and_come_back(folder: Path) -> None:
    recipe, runs = folder / "sparse.yaml", folder / "runs"
    run_json("train", recipe, "--name", "sparse")
    run_json("export", runs / "sparse", "--out", folder / "model")
    values = Recipe.model_validate(yaml.safe_load(recipe.read_text(encoding="utf-8")))
    masks = read_masks(str(folder / "model" / MASKS_FILE), layer_shapes(values.workload))
    fused = load_file(folder / "model" / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(fused[:, :36].T == 0, masks[QUERY])

    given = f"sparsity={{method: given, masks: {folder / 'model' / MASKS_FILE}}}"
    run_json("train", recipe, given, "--name", "given", "seed=5")
    run_json("export", runs / "given", "--out", folder / "again")
    again = read_masks(str(folder / "again" / MASKS_FILE), layer_shapes(values.workload))
    assert again.keys() == masks.keys()
    assert all(torch.equal(again[name], mask) for name, mask in masks.items())
