"""`auto` through the real Ray Train: what is chosen is told and recorded, and stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml

from elastrata.checkpoints.commit import commits
from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.bare_loop import train_on_ranks
from support.command import kill_group, run, start, wait_until
from support.ranks import run_ranks
from support.synthetic import SEQ_LEN, tiny_recipe, write_data_set

STEPS = 60
RELATIVE = 1e-5


@pytest.mark.matrix
def test_a_run_chooses_and_goes_on_with_it_after_a_restart(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=200)
    values = tiny_recipe(
        tmp_path / "data", tmp_path / "runs", steps=STEPS, checkpoint={"every": 10}
    )
    auto = {**values, "micro_batch_tokens": "auto", "activation_checkpointing": "auto"}
    recipe, name, log = tmp_path / "recipe.yaml", "run", tmp_path / "log"
    recipe.write_text(yaml.safe_dump(auto), encoding="utf-8")
    checkpoints = Storage(str(tmp_path / "runs" / name / "checkpoints"))
    first = start("train", recipe, "--name", name, log=log)

    def has_saved() -> bool:
        assert first.poll() is None, log.read_text(encoding="utf-8")
        return bool(commits(checkpoints))

    wait_until(has_saved, 180, "a checkpoint")
    kill_group(first)

    again = run("train", recipe, "--name", name)

    assert again.returncode == 0, again.stderr
    entries = history.read(Storage(str(tmp_path / "runs" / name / "history")))
    began, settled, kept = [entry for entry in entries if entry["kind"] == "chosen"]
    assert (began["step"], began["micro_batch_tokens"]) == (1, SEQ_LEN)
    assert (settled["step"], settled["activation_checkpointing"]) == (5, "none")
    assert kept["text"] == "as before in such a group"
    keys = ("micro_batch_tokens", "activation_checkpointing")
    assert [kept[key] for key in keys] == [settled[key] for key in keys]
    assert f"micro_batch_tokens {kept['micro_batch_tokens']:,}" in again.stdout
    steps = history.effective_steps(entries)
    _assert_same_run(values, steps)
    assert all(step["micro_batch_tokens"] == kept["micro_batch_tokens"] for step in steps[4:])
    _assert_recorded(tmp_path, kept)


def _assert_same_run(values: dict[str, Any], steps: list[Any]) -> None:
    """As one whose recipe leaves nothing open."""
    fixed = run_ranks(1, train_on_ranks, values)[0]
    assert [step["digest"] for step in steps] == [record.digest for record in fixed]
    losses = [record.loss for record in fixed]
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=RELATIVE)


def _assert_recorded(folder: Path, kept: dict[str, Any]) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name != 'Default'")
    (record,) = client.search_runs([experiment.experiment_id])
    assert record.data.params["micro_batch_tokens"] == "auto"
    assert record.data.tags["chosen.micro_batch_tokens"] == str(kept["micro_batch_tokens"])
    assert record.data.metrics["perf/micro_batch_tokens"] == kept["micro_batch_tokens"]
