"""A run that does not notice: nodes come and go while it trains, with `elastrata train` itself."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import pytest

from elastrata.checkpoints.commit import list_commits
from elastrata_pipelines.storage import Storage
from support.command import run, run_json, wait_until
from support.live_run import LiveRun, assert_alike
from support.nodes import Nodes, actors, nodes, send, train_workers, workers_of
from support.short_steps import HOT_STEPS

MATRIX = pytest.mark.matrix


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with nodes() as cluster:
        yield cluster


@MATRIX
def test_a_hung_worker_costs_no_more_than_hot_steps(recipe, undisturbed, cluster, tmp_path) -> None:
    cluster.add(cpus=2)
    live = LiveRun(recipe, "hung", tmp_path / "log", "--address", cluster.address)
    live.wait_for_group(1)
    send(train_workers(cluster.address)[-1], signal.SIGSTOP)
    live.end()
    assert_alike(live, undisturbed)
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert sum(live.rolled_back()) <= HOT_STEPS
    assert live.of_kind("fault")


@MATRIX
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


@MATRIX
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "stop"])
def test_an_interrupted_driver_saves_first(how, recipe, undisturbed, tmp_path) -> None:
    name = f"driver-{how}"
    live = LiveRun(recipe, name, tmp_path / "log", "workers.max=2")
    live.wait_for_group(1)
    if how == "stop":
        stopped = run_json("stop", recipe.parent / "runs" / name)
        assert stopped["state"] == "stopped"
    else:
        live.send(signal.Signals[how])
    assert live.driver.wait(timeout=120) == 130, live.output
    assert [entry["status"] for entry in live.of_kind("ended")] == ["KILLED"]
    again = LiveRun(recipe, name, tmp_path / "again", "workers.max=1")
    again.end()
    assert_alike(again, undisturbed)
    assert again.rolled_back() == []


@MATRIX
def test_a_second_driver_is_refused(recipe, tmp_path) -> None:
    live = LiveRun(recipe, "twice", tmp_path / "log")
    live.wait_for_group(1)
    second = run("train", recipe, "--name", "twice")
    assert second.returncode == 2
    assert f"process {live.driver.pid}" in second.stderr
    live.send(signal.SIGINT)
    live.driver.wait(timeout=120)
    owner = json.loads(
        (recipe.parent / "runs" / "twice" / "driver.json").read_text(encoding="utf-8")
    )
    assert owner["released"]


@MATRIX
def test_a_failed_save_is_taken_again_soon(recipe, tmp_path) -> None:
    every = 1000
    longer = ("steps=20000", f"checkpoint.every={every}")
    live = LiveRun(recipe, "unsaved", tmp_path / "log", *longer)
    live.wait_for_group(1)
    checkpoints = recipe.parent / "runs" / "unsaved" / "checkpoints"
    checkpoints.write_text("no folder can be made here", encoding="utf-8")
    wait_until(lambda: f"checkpoint of step {every} failed" in live.output, 400, "a failed save")
    checkpoints.unlink()
    newest = wait_until(lambda: list_commits(Storage(str(checkpoints))), 300, "a commit")[0]
    assert every < newest.step < 2 * every
    live.send(signal.SIGINT)
    assert live.driver.wait(timeout=120) == 130, live.output


@MATRIX
def test_the_last_state_outlives_storage_and_worker(recipe, tmp_path) -> None:
    """The last save fails, then a worker dies: what is in memory is the run's end all the same."""
    few = ("steps=200", "checkpoint.every=1000", "workers.max=2")
    live = LiveRun(recipe, "last-save", tmp_path / "log", *few)
    live.wait_for_group(1)
    checkpoints = recipe.parent / "runs" / "last-save" / "checkpoints"
    checkpoints.write_text("no folder can be made here", encoding="utf-8")
    wait_until(lambda: "checkpoint of step 200 failed" in live.output, 300, "a failed save")
    send(workers_of(live.driver.pid)[-1], signal.SIGKILL)
    wait_until(lambda: live.groups() == 2, 300, "another group")
    checkpoints.unlink()
    live.end()
    assert [entry["step"] for entry in live.of_kind("started")] == [0, 200]
    assert [entry["state"] for entry in live.of_kind("started")] == ["new", "hot"]
    assert list_commits(Storage(str(checkpoints)))[0].step == 200
    assert [step["step"] for step in live.steps()] == list(range(1, 201))


@MATRIX
def test_an_interrupt_waits_for_storage(recipe, tmp_path) -> None:
    live = LiveRun(recipe, "interrupted-save", tmp_path / "log", "steps=20000")
    live.wait_for_group(1)
    checkpoints = recipe.parent / "runs" / "interrupted-save" / "checkpoints"
    checkpoints.write_text("no folder can be made here", encoding="utf-8")
    live.send(signal.SIGTERM)
    wait_until(lambda: " failed, training continues" in live.output, 60, "a failed save")
    checkpoints.unlink()
    assert live.driver.wait(timeout=120) == 130, live.output
    (halted,) = live.of_kind("halted")
    assert list_commits(Storage(str(checkpoints)))[0].step == halted["step"]


@MATRIX
def test_an_interrupt_on_a_full_disk_does_not_wait_for_room(recipe, tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        live = LiveRun(recipe, "full", tmp_path / "log", "steps=20000", f"storage={disk}/runs")
        live.wait_for_checkpoint()
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        live.send(signal.SIGINT)
        assert live.driver.wait(timeout=100) == 130, live.output  # checkpoint.grace_seconds: 120
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert f"No space left on device: the disk mounted at {disk} has 0 bytes free" in live.output
    assert "the run ends without its newest state" in live.output
    assert "Traceback" not in live.output
