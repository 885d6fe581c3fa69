"""Workers, nodes and the driver are killed, nodes join and leave: the run stays the same run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from elastrata.run import history
from elastrata.run.goodput import goodput
from elastrata_pipelines.storage import Storage
from support.command import run_json
from support.live_run import LiveRun, assert_alike
from support.nodes import Nodes, nodes, send, train_workers
from support.short_steps import HOT_STEPS, write_recipe

STEPS = 1500


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("faults"), steps=STEPS)


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> list[Any]:
    """The steps of the same recipe on one worker."""
    run_json("train", recipe, "--name", "alone", "workers.max=1", "checkpoint.hot_steps=0")
    entries = history.read(Storage(str(recipe.parent / "runs" / "alone" / "history")))
    return list(history.effective_steps(entries))


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with nodes() as cluster:
        yield cluster


def assert_audited(recipe: Path, name: str) -> None:
    """The run's record proves that every sample was used once for each epoch."""
    assert run_json("audit", recipe.parent / "runs" / name)["partition_ok"]


def test_a_killed_worker_and_a_killed_node_cost_a_few_steps(
    recipe: Path, undisturbed: list[Any], cluster: Nodes, tmp_path: Path
) -> None:
    cluster.add(cpus=1)
    second = cluster.add(cpus=2)
    live = LiveRun(recipe, "killed", tmp_path / "log", "--address", cluster.address)
    live.wait_for_group(1)
    send(train_workers(cluster.address)[-1], signal.SIGKILL)
    live.wait_for_group(2)
    cluster.kill(second)
    live.end()
    assert_alike(live, undisturbed)
    started = live.of_kind("started")
    assert (started[0]["world_size"], started[-1]["world_size"]) == (3, 1)
    assert [entry["state"] for entry in started] == ["new"] + ["hot"] * (len(started) - 1)
    assert all(lost <= HOT_STEPS for lost in live.rolled_back())
    assert_audited(recipe, "killed")


def test_nodes_that_join_and_leave_cost_no_step(
    recipe: Path, undisturbed: list[Any], cluster: Nodes, tmp_path: Path
) -> None:
    first = cluster.add(cpus=1)
    live = LiveRun(recipe, "resized", tmp_path / "log", "--address", cluster.address)
    live.wait_for_group(1)
    cluster.add(cpus=2)
    live.wait_for_group(2)
    cluster.drain(first, seconds=60)
    live.end()
    assert_alike(live, undisturbed)
    assert [entry["world_size"] for entry in live.of_kind("started")] == [1, 3, 2]
    assert [entry["reason"] for entry in live.of_kind("halted")] == ["resize", "drain"]
    assert live.rolled_back() == []
    account = goodput(live.entries())
    assert abs(account.other) <= 0.01 * account.total
    assert_audited(recipe, "resized")


def test_a_killed_driver_is_continued_by_the_same_command(
    recipe: Path, undisturbed: list[Any], tmp_path: Path
) -> None:
    live = LiveRun(recipe, "driver-killed", tmp_path / "log", "workers.max=2")
    live.wait_for_checkpoint()
    live.send(signal.SIGKILL)
    live.driver.wait()
    again = LiveRun(recipe, "driver-killed", tmp_path / "again", "workers.max=1")
    again.end()
    assert "is dead; taking over" in again.output
    assert [entry["state"] for entry in again.of_kind("started")] == ["new", "durable"]
    assert_alike(again, undisturbed)
    assert_audited(recipe, "driver-killed")
    assert_logged_once(recipe, "driver-killed")


def assert_logged_once(recipe: Path, name: str) -> None:
    """MLflow has one finished run of that name, with every step once."""
    client = MlflowClient(f"sqlite:///{recipe.parent / 'runs' / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (record,) = client.search_runs(experiments, f"tags.mlflow.runName = '{name}'")
    assert record.info.status == "FINISHED"
    logged = [metric.step for metric in client.get_metric_history(record.info.run_id, "train/loss")]
    assert sorted(logged) == list(range(1, STEPS + 1))
