"""A run that does not notice: nodes come and go while it trains, with `elastrata train` itself."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from elastrata.checkpoints.commit import commits
from elastrata.run.goodput import goodput
from elastrata_pipelines.storage import Storage
from support.command import run, wait_until
from support.live_run import LiveRun, assert_alike
from support.nodes import Nodes, actors, nodes, send, train_workers, workers_of
from support.short_steps import HOT_STEPS

SLOW = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with nodes() as cluster:
        yield cluster


@SLOW  # a cluster of three nodes
def test_grows_and_makes_way_without_losing_a_step(recipe, undisturbed, cluster, tmp_path) -> None:
    first = cluster.add(cpus=1)
    live = LiveRun(recipe, "grown", tmp_path / "log", "--address", cluster.address)
    live.wait_for_group(1)
    cluster.add(cpus=2)
    live.wait_for_group(2)
    cluster.drain(first, seconds=60)
    live.end()
    assert_alike(live, undisturbed)
    assert [entry["world_size"] for entry in live.of_kind("started")] == [1, 3, 2]
    assert [entry["stayed"] for entry in live.of_kind("started")] == [0, 1, 2]
    assert live.rolled_back() == []
    account = goodput(live.entries())
    assert abs(account.other) <= 0.01 * account.total
    assert account.steps > 0 < account.halted
    assert [entry["reason"] for entry in live.of_kind("halted")] == ["resize", "drain"]


@SLOW
def test_a_lost_node_costs_no_more_than_hot_steps(recipe, undisturbed, cluster, tmp_path) -> None:
    cluster.add(cpus=1)
    second = cluster.add(cpus=2)
    live = LiveRun(recipe, "node-lost", tmp_path / "log", "--address", cluster.address)
    live.wait_for_group(1)
    cluster.kill(second)
    live.end()
    assert_alike(live, undisturbed)
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert [entry["world_size"] for entry in live.of_kind("started")] == [3, 1]
    assert [entry["stayed"] for entry in live.of_kind("started")] == [0, 1]
    assert sum(live.rolled_back()) <= HOT_STEPS


@SLOW
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_or_hung_worker_costs_no_more_than_hot_steps(
    number, recipe, undisturbed, cluster, tmp_path
) -> None:
    cluster.add(cpus=2)
    name = f"worker-{number.name}"
    live = LiveRun(recipe, name, tmp_path / "log", "--address", cluster.address)
    live.wait_for_group(1)
    send(train_workers(cluster.address)[-1], number)
    live.end()
    assert_alike(live, undisturbed)
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert sum(live.rolled_back()) <= HOT_STEPS
    assert live.of_kind("fault")
    if number == signal.SIGKILL:  # who hangs may be found before all are killed
        assert [entry["stayed"] for entry in live.of_kind("started")] == [0, 1]


@SLOW
@pytest.mark.parametrize("name", ["TrainController", "ControlChannel", "ReplicaRegistry"])
def test_a_killed_helper_is_replaced(name, recipe, undisturbed, cluster, tmp_path) -> None:
    cluster.add(cpus=2)
    live = LiveRun(recipe, f"no{name}", tmp_path / "log", "--address", cluster.address)
    live.wait_for_group(1)
    (helper,) = actors(name, cluster.address)
    send(helper, signal.SIGKILL)
    if name == "TrainController":
        live.wait_for_group(2)
    else:  # a new one is of use: the next group continues from what was copied since
        live.wait_for_more(steps=3 * HOT_STEPS)
        send(train_workers(cluster.address)[-1], signal.SIGKILL)
    live.end()
    assert_alike(live, undisturbed)
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert len(live.of_kind("fault")) == 1
    assert sum(live.rolled_back()) <= HOT_STEPS


@SLOW
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_driver_saves_first(number, recipe, undisturbed, tmp_path) -> None:
    name = f"driver-{number.name}"
    live = LiveRun(recipe, name, tmp_path / "log", "workers.max=2")
    live.wait_for_group(1)
    live.send(number)
    assert live.driver.wait(timeout=120) == 130, live.output
    assert [entry["status"] for entry in live.of_kind("ended")] == ["KILLED"]
    again = LiveRun(recipe, name, tmp_path / "again", "workers.max=1")
    again.end()
    assert_alike(again, undisturbed)
    assert again.rolled_back() == []


@SLOW
def test_a_killed_driver_goes_on_from_storage(recipe, undisturbed, tmp_path) -> None:
    live = LiveRun(recipe, "driver-killed", tmp_path / "log", "workers.max=2")
    wait_until(lambda: "checkpoint of step 200" in live.output, 180, "a checkpoint")
    live.send(signal.SIGKILL)
    live.driver.wait()
    again = LiveRun(recipe, "driver-killed", tmp_path / "again", "workers.max=1")
    again.end()
    assert "is dead; taking over" in again.output
    assert [entry["state"] for entry in again.of_kind("started")] == ["new", "durable"]
    assert_alike(again, undisturbed)


@SLOW
def test_a_second_driver_is_refused(recipe, tmp_path) -> None:
    live = LiveRun(recipe, "twice", tmp_path / "log")
    live.wait_for_group(1)
    second = run("train", recipe, "--name", "twice")
    assert second.returncode == 2
    assert f"process {live.driver.pid}" in second.stderr
    live.send(signal.SIGINT)
    live.driver.wait(timeout=120)
    owner = json.loads((recipe.parent / "runs" / "twice" / "driver.json").read_text())
    assert owner["released"]


@SLOW
def test_a_failed_save_is_taken_again_soon(recipe, tmp_path) -> None:
    every = 1000
    longer = ("steps=20000", f"checkpoint.every={every}")
    live = LiveRun(recipe, "unsaved", tmp_path / "log", *longer)
    live.wait_for_group(1)
    checkpoints = recipe.parent / "runs" / "unsaved" / "checkpoints"
    checkpoints.write_text("no folder can be made here")
    wait_until(lambda: f"checkpoint of step {every} failed" in live.output, 400, "a failed save")
    checkpoints.unlink()
    newest = wait_until(lambda: commits(Storage(str(checkpoints))), 300, "a commit")[0]
    assert every < newest.step < 2 * every
    live.send(signal.SIGINT)
    assert live.driver.wait(timeout=120) == 130, live.output


@SLOW
def test_the_last_state_outlives_storage_and_worker(recipe, tmp_path) -> None:
    """The last save fails, then a worker dies: what is in memory is the run's end all the same."""
    few = ("steps=200", "checkpoint.every=1000", "workers.max=2")
    live = LiveRun(recipe, "last-save", tmp_path / "log", *few)
    live.wait_for_group(1)
    checkpoints = recipe.parent / "runs" / "last-save" / "checkpoints"
    checkpoints.write_text("no folder can be made here")
    wait_until(lambda: "checkpoint of step 200 failed" in live.output, 300, "a failed save")
    send(workers_of(live.driver.pid)[-1], signal.SIGKILL)
    wait_until(lambda: live.groups() == 2, 300, "another group")
    checkpoints.unlink()
    live.end()
    assert [entry["step"] for entry in live.of_kind("started")] == [0, 200]
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert commits(Storage(str(checkpoints)))[0].step == 200
    assert [step["step"] for step in live.steps()] == list(range(1, 201))


@SLOW
def test_an_interrupt_waits_for_storage(recipe, tmp_path) -> None:
    live = LiveRun(recipe, "interrupted-save", tmp_path / "log", "steps=20000")
    live.wait_for_group(1)
    checkpoints = recipe.parent / "runs" / "interrupted-save" / "checkpoints"
    checkpoints.write_text("no folder can be made here")
    live.send(signal.SIGTERM)
    wait_until(lambda: " failed, training goes on" in live.output, 60, "a failed save")
    checkpoints.unlink()
    assert live.driver.wait(timeout=120) == 130, live.output
    (halted,) = live.of_kind("halted")
    assert commits(Storage(str(checkpoints)))[0].step == halted["step"]
