"""Workers, nodes and the driver are killed, nodes join and leave: the run stays the same run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from support.command import run_json
from support.live_run import LiveRun, assert_alike
from support.nodes import Nodes, nodes, send, train_workers
from support.short_steps import HOT_STEPS, write_recipe

STEPS = 20_000
"""More than there is time for: a test interrupts its run when all has happened, so that no run ends
too early on a fast machine."""
HANG_SECONDS = 300
"""So that a worker that a busy machine starves is not taken for one that hangs."""
MOST_LOST = 2 * HOT_STEPS
"""A copy in memory is made every `HOT_STEPS` steps; the newest may not be complete at the kill."""


class Undisturbed:
    """The steps of the same recipe on one worker, as many as a test asks for."""

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe
        self._steps: list[Any] = []

    def steps(self, count: int) -> list[Any]:
        """Return the first `count` steps, after training those that are missing."""
        if len(self._steps) < count:
            settings = ("workers.max=1", "checkpoint.hot_steps=0")
            alone = LiveRun(self._recipe, "alone", self._recipe.with_name("alone.log"), *settings)
            alone.wait_for_step(count)
            alone.interrupt()
            self._steps = alone.steps()
        return self._steps[:count]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    return write_recipe(folder, steps=STEPS, hang_seconds=HANG_SECONDS, lr=1e-3)


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Undisturbed:
    return Undisturbed(recipe)


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with nodes() as cluster:
        yield cluster


def assert_same_run(live: LiveRun, undisturbed: Undisturbed, folder: Path) -> None:
    """The run took the steps of the undisturbed one, and its record proves it."""
    assert_alike(live, undisturbed.steps(len(live.steps())))
    assert run_json("audit", folder)["partition_ok"]


def test_a_killed_worker_and_a_killed_node_cost_a_few_steps(
    recipe: Path, undisturbed: Undisturbed, cluster: Nodes, tmp_path: Path
) -> None:
    cluster.add(cpus=1)
    second = cluster.add(cpus=2)
    live = LiveRun(recipe, "killed", tmp_path / "log", "--address", cluster.address)
    live.wait_for_size(3, number=1, steps=30)
    send(train_workers(cluster.address)[-1], signal.SIGKILL)
    live.wait_for_size(3, number=2, steps=30)
    cluster.kill(second)
    live.wait_for_size(1, number=3, steps=30)
    live.interrupt()
    assert_same_run(live, undisturbed, recipe.parent / "runs" / "killed")
    started = live.of_kind("started")
    assert [entry["state"] for entry in started] == ["new"] + ["hot"] * (len(started) - 1)
    assert all(lost <= MOST_LOST for lost in live.rolled_back())


def test_nodes_that_join_and_leave_cost_no_step(
    recipe: Path, undisturbed: Undisturbed, cluster: Nodes, tmp_path: Path
) -> None:
    first = cluster.add(cpus=1)
    live = LiveRun(recipe, "resized", tmp_path / "log", "--address", cluster.address)
    live.wait_for_size(1, number=1, steps=30)
    cluster.add(cpus=2)
    live.wait_for_size(3, number=2, steps=30)
    cluster.drain(first, seconds=600)
    live.wait_for_size(2, number=3, steps=30)
    live.interrupt()
    assert_same_run(live, undisturbed, recipe.parent / "runs" / "resized")
    started = live.of_kind("started")
    assert [entry["world_size"] for entry in started] == [1, 3, 2]
    assert [entry["stayed"] for entry in started] == [0, 1, 2]
    assert [entry["reason"] for entry in live.of_kind("halted")][:2] == ["resize", "drain"]
    assert live.rolled_back() == []


def test_a_killed_driver_is_continued_by_the_same_command(
    recipe: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    often = "checkpoint.every=50"
    live = LiveRun(recipe, "driver-killed", tmp_path / "log", "workers.max=2", often)
    live.wait_for_checkpoint()
    live.send(signal.SIGKILL)
    live.driver.wait()
    again = LiveRun(recipe, "driver-killed", tmp_path / "again", "workers.max=1", often)
    again.wait_for_group(1)
    again.interrupt()
    assert "is dead; taking over" in again.output
    started = again.of_kind("started")
    assert [entry["state"] for entry in started] == ["new", "durable"]
    assert [entry["world_size"] for entry in started] == [2, 1]
    assert_same_run(again, undisturbed, recipe.parent / "runs" / "driver-killed")
    assert_logged_once(recipe, "driver-killed", len(again.steps()))


def assert_logged_once(recipe: Path, name: str, steps: int) -> None:
    """MLflow has one run of that name, with the true status and every step once."""
    client = MlflowClient(f"sqlite:///{recipe.parent / 'runs' / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (record,) = client.search_runs(experiments, f"tags.mlflow.runName = '{name}'")
    assert record.info.status == "KILLED"
    logged = [metric.step for metric in client.get_metric_history(record.info.run_id, "train/loss")]
    assert sorted(logged) == list(range(1, steps + 1))
