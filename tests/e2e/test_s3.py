"""Data, checkpoints and export on an object store, through a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastrata.checkpoints.commit import commits
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.command import run, run_json
from support.lone_run import train_alone
from support.synthetic import tiny_recipe, write_data_set

RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 each."""


def test_a_run_whose_data_and_storage_are_on_s3(bucket: str, tmp_path: Path) -> None:
    write_data_set(f"{bucket}/data", samples=100)
    write_data_set(tmp_path / "data", samples=100)
    tracking = {"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    changes = {"steps": 6, "checkpoint": {"every": 3}, "tracking": tracking}
    (tmp_path / "s3.yaml").write_text(
        yaml.safe_dump(tiny_recipe(f"{bucket}/data", f"{bucket}/runs", **changes)), encoding="utf-8"
    )
    local = train_alone(
        Recipe.model_validate(tiny_recipe(tmp_path / "data", tmp_path / "runs", **changes)),
        tmp_path / "runs" / "local",
    )

    remote = run_json("train", tmp_path / "s3.yaml", "--name", "run")

    assert remote["status"] == "FINISHED"
    assert remote["run_dir"] == f"{bucket}/runs/run"
    expected = history.effective_steps(history.read(Storage(str(local / "history"))))
    assert remote["final_loss"] == pytest.approx(expected[-1]["loss"], rel=RELATIVE)
    storage = Storage(f"{bucket}/runs/run")
    assert [commit.step for commit in commits(storage.sub("checkpoints"))] == [6, 3]
    steps = history.effective_steps(history.read(storage.sub("history")))
    assert [step["digest"] for step in steps] == [step["digest"] for step in expected]
    exported = run_json("export", remote["run_dir"], "--out", tmp_path / "model")
    assert (Path(exported["path"]) / "model.safetensors").exists()


def test_remote_storage_needs_a_place_for_the_record(bucket: str, tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=100)
    recipe = tiny_recipe(tmp_path / "data", f"{bucket}/runs")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = run("train", tmp_path / "recipe.yaml", "--name", "run")
    assert done.returncode == 2
    assert "tracking.uri: null: expected a URI such as http://HOST:5000" in done.stderr
    assert Storage(f"{bucket}/runs").names() == []
