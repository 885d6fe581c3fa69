"""Runs with a target, through the real Ray Train: they stop at it, stay stopped, or miss it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

import elastrata
from elastrata import TrainResult
from elastrata.checkpoints.commit import list_commits
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.audit import audit
from elastrata.run.status import status
from elastrata_pipelines.storage import Storage
from support.command import kill_group, run, run_json, start, wait_until
from support.live_run import LiveRun
from support.nodes import send, workers_of
from support.synthetic import tiny_recipe, write_data_set

STEPS = 120
EVERY_SAMPLES = 200
TARGET = {"metric": "eval/loss", "at_most": 3.7}
STEP = 39
"""The first step that reaches 800 samples, 21 at a time. The loss is 3.9 after 600, 3.6 there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_data_set(folder / "data", samples=400, held_out=50)
    return folder


def _values(folder: Path, **changes: Any) -> dict[str, Any]:
    values = {
        "steps": STEPS,
        "optimizer": {"lr": 1e-2},
        "evaluation": {"every_samples": EVERY_SAMPLES},
        "checkpoint": {"every": 1000},
        "target": TARGET,
    }
    return tiny_recipe(folder / "data", folder / "runs", **{**values, **changes})


def _train(folder: Path, name: str, **changes: Any) -> TrainResult:
    return elastrata.train(Recipe.model_validate({"name": name, **_values(folder, **changes)}))


def _run(folder: Path, name: str) -> Storage:
    return Storage(str(folder / "runs" / name))


def _entries(folder: Path, name: str, kind: str) -> list[Any]:
    entries = history.read_entries(_run(folder, name).sub("history"))
    return [entry for entry in entries if entry["kind"] == kind]


def _record(folder: Path, result: TrainResult) -> Any:
    client = MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    return client.get_run(result.mlflow_run_id)


@pytest.mark.matrix  # three launches
@pytest.mark.usefixtures("ray_local")
def test_a_run_ends_at_its_target_and_stays_ended(folder: Path) -> None:
    two = {"min": 2, "max": 2, "cpus": 0.4, "threads": 1, "spares": False}
    done = _train(folder, "reached", workers=two)
    target = done.target
    assert target is not None
    assert (done.status, done.steps, done.world_sizes) == ("FINISHED", STEP, [2])
    assert (target.reached, target.step, target.samples) == (True, STEP, 21 * STEP)
    assert target.value is not None
    assert target.value <= 3.7
    assert target.tokens == done.tokens_seen
    assert 0 < target.seconds_in_steps < target.seconds

    newest = list_commits(_run(folder, "reached").sub("checkpoints"))[0]
    assert (newest.step, newest.evaluation["eval/loss"]) == (STEP, target.value)
    assert [e["step"] for e in _entries(folder, "reached", "evaluated")] == [10, 20, 29, STEP]
    (entry,) = _entries(folder, "reached", "reached")
    assert (entry["step"], entry["value"], entry["metric"]) == (STEP, target.value, "eval/loss")

    found = status(_run(folder, "reached"))
    assert (found.state, found.steps, found.target) == ("finished", STEP, target)
    assert audit(_run(folder, "reached")).partition_ok
    record = _record(folder, done)
    assert record.info.status == "FINISHED"
    assert record.data.tags["target"] == str(target)
    assert {name: record.data.metrics[name] for name in target.to_metrics()} == target.to_metrics()

    assert _train(folder, "reached", workers=two) == done
    assert len(_entries(folder, "reached", "started")) == 1
    _assert_a_further_target_goes_on(folder)


def _assert_a_further_target_goes_on(folder: Path) -> None:
    further = _train(folder, "reached", target={**TARGET, "at_most": 3.4})
    assert further.target is not None
    assert further.target.reached
    assert STEP < further.steps < STEPS
    groups = _entries(folder, "reached", "started")
    assert [(group["step"], group["state"]) for group in groups] == [(0, "new"), (STEP, "durable")]
    assert audit(_run(folder, "reached")).partition_ok
    ended = list_commits(_run(folder, "reached").sub("checkpoints"))[0]
    assert ended.step == further.steps


@pytest.mark.matrix
def test_a_driver_killed_at_the_target_leaves_a_finished_run(folder: Path, tmp_path: Path) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(_values(folder)), encoding="utf-8")
    driver = start("train", folder / "recipe.yaml", "--name", "killed", log=tmp_path / "log")
    checkpoints = _run(folder, "killed").sub("checkpoints")
    wait_until(lambda: list_commits(checkpoints), 300, "the checkpoint of the target")
    kill_group(driver)

    done = run_json("train", folder / "recipe.yaml", "--name", "killed")
    assert (done["status"], done["steps"], done["world_sizes"]) == ("FINISHED", STEP, [1])
    assert (done["target"]["reached"], done["target"]["step"]) == (True, STEP)
    again = run("train", folder / "recipe.yaml", "--name", "killed")
    assert again.returncode == 0, again.stderr
    assert "  target   reached: eval/loss 3." in again.stdout
    assert "training on" not in again.stdout


@pytest.mark.matrix
def test_a_target_reached_in_memory_alone_is_kept(
    folder: Path, tmp_path: Path, workers_are_children: None
) -> None:
    """The save of that step fails, then a worker dies: nothing is trained again."""
    step = 180
    values = _values(folder, steps=400, evaluation={"every": step})
    values["checkpoint"] |= {"hot_steps": 2}
    values["workers"] |= {"max": 2, "cpus": 1}
    (folder / "hot.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    live = LiveRun(folder / "hot.yaml", "hot", tmp_path / "log")
    live.wait_for_group(1)
    checkpoints = folder / "runs" / "hot" / "checkpoints"
    checkpoints.write_text("no folder can be made here", encoding="utf-8")
    wait_until(lambda: f"checkpoint of step {step} failed" in live.output, 300, "a failed save")
    send(workers_of(live.driver.pid)[-1], signal.SIGKILL)
    wait_until(lambda: live.groups() == 2, 300, "another group")
    checkpoints.unlink()
    live.end()
    assert [entry["step"] for entry in live.of_kind("started")] == [0, step]
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert list_commits(Storage(str(checkpoints)))[0].step == step
    assert len(live.steps()) == step
    assert "  target   reached: eval/loss " in live.output
