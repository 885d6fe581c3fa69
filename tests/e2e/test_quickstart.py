"""The quickstart, shortened: what it promises is there, and a second run uses the first."""

from __future__ import annotations

from pathlib import Path

from mlflow import MlflowClient
from transformers import AutoModelForMaskedLM

from support.command import run, run_json
from support.documented import documented_keys

SHORT = (
    "steps=4",
    "batch_size=8",
    "schedule.warmup_steps=1",
    "evaluation.samples=16",
    "data.prepare.tokenizer.max_bytes=200000",
)


def test_the_main_job(tmp_path: Path) -> None:
    result = run_json("quickstart", *SHORT, "--out", "q", cwd=tmp_path)
    assert list(result) == [*documented_keys("train"), *documented_keys("quickstart")]
    assert (result["status"], result["steps"], result["world_sizes"]) == ("FINISHED", 4, [2])
    assert result["samples_seen"] == 32
    assert result["evaluation"]["eval/loss"] > 0
    for picture in ("loss-curve.png", "length-strata.png"):
        assert (Path(result["plots"]) / picture).read_bytes().startswith(b"\x89PNG")
    AutoModelForMaskedLM.from_pretrained(result["model"])
    assert all(len(guess["words"]) == 3 for guess in result["filled"])
    client = MlflowClient(f"sqlite:///{tmp_path}/q/runs/mlflow.db")
    assert client.get_run(result["mlflow_run_id"]).info.status == "FINISHED"
    plots = {item.path for item in client.list_artifacts(result["mlflow_run_id"], "plots")}
    assert plots == {"plots/loss-curve.png", "plots/length-strata.png"}
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    exported = run_json("export", result["run_dir"], "--out", tmp_path / "q" / "again")
    assert list(exported) == documented_keys("export")
    AutoModelForMaskedLM.from_pretrained(exported["path"])

    again = run("quickstart", *SHORT, "--out", "q", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/q/runs/mlflow.db" in again.stdout
    assert "already prepared" in again.stdout
    assert "step " not in again.stdout
    assert len(client.search_runs(["1"])) == 1
