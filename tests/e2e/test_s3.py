"""Data, checkpoints and export on an object store, through a real S3 server."""

from __future__ import annotations

from pathlib import Path

import yaml

from elastrata.checkpoints.commit import list_commits
from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.command import run, run_json
from support.synthetic import tiny_recipe, write_data_set


def test_a_run_whose_data_and_storage_are_on_s3(bucket: str, tmp_path: Path) -> None:
    write_data_set(f"{bucket}/data", samples=100)
    write_data_set(tmp_path / "data", samples=100)
    tracking = {"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    changes = {"steps": 6, "checkpoint": {"every": 3}, "tracking": tracking}
    (tmp_path / "s3.yaml").write_text(
        yaml.safe_dump(tiny_recipe(f"{bucket}/data", f"{bucket}/runs", **changes)), encoding="utf-8"
    )
    (tmp_path / "local.yaml").write_text(
        yaml.safe_dump(tiny_recipe(tmp_path / "data", tmp_path / "runs", **changes)),
        encoding="utf-8",
    )

    remote = run_json("train", tmp_path / "s3.yaml", "--name", "run")
    local = run_json("train", tmp_path / "local.yaml", "--name", "run")

    assert remote["status"] == "FINISHED"
    assert remote["run_dir"] == f"{bucket}/runs/run"
    assert remote["final_loss"] == local["final_loss"]
    storage = Storage(f"{bucket}/runs/run")
    assert [commit.step for commit in list_commits(storage.sub("checkpoints"))] == [6, 3]
    steps = history.effective_steps(history.read_entries(storage.sub("history")))
    assert [step["step"] for step in steps] == list(range(1, 7))
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
