"""The quickstart, shortened: everything it promises is there, and a second run uses the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from transformers import AutoModelForMaskedLM

from elastrata.launch.quickstart import collect_corpus
from support.command import run, run_json
from support.documented import documented_keys

SHORT = (
    "steps=4",
    "batch_size=8",
    "schedule.warmup_steps=1",
    "evaluation.samples=16",
    "data.prepare.tokenizer.max_bytes=200000",
)


@pytest.mark.slow  # a run of two workers
def test_a_modernbert_is_trained_as_well(tmp_path: Path) -> None:
    command = ("quickstart", "--model", "modernbert", *SHORT, "--out", "q")
    result = run_json(*command, cwd=tmp_path)
    assert list(result) == [*documented_keys("train"), *documented_keys("quickstart")]
    assert (result["status"], result["steps"], result["world_sizes"]) == ("FINISHED", 4, [2])
    model = AutoModelForMaskedLM.from_pretrained(result["model"])
    assert type(model).__name__ == "ModernBertForMaskedLM"
    assert all(len(guess["words"]) == 3 for guess in result["filled"])
    assert result["packages_told"]["chance"] == 1 / 8
    assert (tmp_path / "q" / "modernbert-data" / "manifest.json").exists()


@pytest.mark.slow  # a run of two workers, and another process that has nothing left to do
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
    assert 0 < result["packages_told"]["untrained"] < 1
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


def test_the_corpus_is_pythons_library_and_stays(tmp_path: Path) -> None:
    corpus = collect_corpus(tmp_path / "corpus")
    assert corpus.bytes > 1_000_000
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*.py")}
    assert len(written) == corpus.files
    assert tmp_path / "corpus" / "argparse.py" in written
    assert not (tmp_path / "corpus" / "test").exists()
    assert collect_corpus(tmp_path / "corpus") == corpus
    assert {path: path.stat().st_mtime_ns for path in written} == written
