"""A run that began with weights is killed, and its parent is gone."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml

from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.folder import read_identity
from elastrata_pipelines.storage import Storage
from support.command import run_json
from support.live_run import RELATIVE, LiveRun
from support.lone_run import lone_run, train_alone
from support.nodes import send, workers_of
from support.synthetic import tiny_recipe

STEPS, HOT_STEPS = 400, 10
TWO = ("workers.min=2", "workers.max=2")


def _steps(run: Path) -> list[Any]:
    return list(history.effective_steps(history.read_entries(Storage(str(run)).sub("history"))))


def _recipe(folder: Path) -> dict[str, Any]:
    return tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=STEPS,
        begin_with={"weights": f"{folder / 'runs' / 'parent'}@2", "optimizer": True},
        optimizer={"lr": 1e-3},
        evaluation={"every": STEPS, "samples": 32},
        checkpoint={"every": STEPS, "hot_steps": HOT_STEPS},
    )


@pytest.mark.matrix
def test_a_killed_worker_of_a_begun_run_reads_no_weights_anew(tmp_path: Path) -> None:
    parent = lone_run(tmp_path, "parent")
    values = _recipe(tmp_path)
    undisturbed = train_alone(Recipe.model_validate(values), tmp_path / "runs" / "undisturbed")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    live = LiveRun(tmp_path / "recipe.yaml", "child", tmp_path / "log", *TWO)
    live.wait_for_group(1, steps=3 * HOT_STEPS)
    shutil.rmtree(parent)
    send(workers_of(live.driver.pid)[-1], signal.SIGKILL)
    live.end()
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert sum(live.rolled_back()) <= HOT_STEPS
    expected = _steps(undisturbed)
    assert [s["digest"] for s in live.steps()] == [s["digest"] for s in expected]
    losses = pytest.approx([s["loss"] for s in expected], rel=RELATIVE)
    assert [s["loss"] for s in live.steps()] == losses
    assert [entry["step"] for entry in live.of_kind("evaluated")] == [0, STEPS]
    _is_on_record(tmp_path / "runs" / "child")


def _is_on_record(child: Path) -> None:
    identity = read_identity(Storage(str(child)))
    assert identity is not None
    assert identity.parent is not None
    assert run_json("audit", child)["parent"] == identity.parent.model_dump()
    client = mlflow.MlflowClient(f"sqlite:///{child.parent / 'mlflow.db'}")
    record = client.get_run(identity.mlflow_run_id or "")
    tags = {"parent": identity.parent.url, "parent.sha256": identity.parent.sha256}
    assert {**tags, "parent.step": "2"}.items() <= record.data.tags.items()
