"""A run that does not notice: nodes come and go while it trains, with `elastrata train` itself."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastrata import history
from elastrata_pipelines.storage import Storage
from support.command import run, run_json, start, wait_until
from support.nodes import Nodes, nodes, send, train_workers
from support.synthetic import tiny_recipe, write_data_set

STEPS, HOT_STEPS = 600, 10
RELATIVE = 1e-4
"""fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some 600 short steps that takes few durable checkpoints and many hot ones."""
    folder = tmp_path_factory.mktemp("faults")
    write_data_set(folder / "data", samples=2000)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=STEPS,
        optimizer={"lr": 3e-3},
        checkpoint={"every": 200, "hot_steps": HOT_STEPS, "hot_bytes": 2**26},
    )
    values["workers"] |= {"min": 1, "max": 3, "resize_seconds": 1, "hang_seconds": 10}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> list[Any]:
    run_json("train", recipe, "workers.max=1", "checkpoint.hot_steps=0", "--name", "undisturbed")
    return steps_of(recipe, "undisturbed")


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with nodes() as cluster:
        yield cluster


def entries_of(recipe: Path, name: str) -> list[Any]:
    return history.read(Storage(str(recipe.parent / "runs" / name / "history")))


def steps_of(recipe: Path, name: str) -> list[Any]:
    return list(history.effective_steps(entries_of(recipe, name)))


def started(recipe: Path, name: str) -> list[Any]:
    return [entry for entry in entries_of(recipe, name) if entry["kind"] == "started"]


def rolled_back(recipe: Path, name: str) -> list[int]:
    return [
        entry["last"] - entry["first"] + 1
        for entry in entries_of(recipe, name)
        if entry["kind"] == "rolled_back"
    ]


def begin(
    recipe: Path, name: str, cluster: Nodes, log: Path, *more: str
) -> subprocess.Popen[bytes]:
    return start(
        "train", recipe, "--name", name, "--address", cluster.address, *more, log=log / "log"
    )


def wait_for_group(recipe: Path, name: str, groups: int, log: Path) -> None:
    """Until so many groups of workers have started, and the newest one has taken steps."""

    def has_stepped() -> bool:
        lines = (log / "log").read_text().splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("training on")]
        stepped = lambda lines: any(line.startswith("step") for line in lines)  # noqa: E731
        return len(starts) >= groups and stepped(lines[starts[groups - 1] + 1 :])

    wait_until(has_stepped, 90, f"{groups} groups\n{(log / 'log').read_text()}")


def assert_finished_alike(
    driver: subprocess.Popen[bytes], recipe: Path, name: str, log: Path, undisturbed: list[Any]
) -> None:
    assert driver.wait(timeout=240) == 0, (log / "log").read_text()
    steps = steps_of(recipe, name)
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert [s["digest"] for s in steps] == [s["digest"] for s in undisturbed]
    assert [s["loss"] for s in steps] == pytest.approx(
        [s["loss"] for s in undisturbed], rel=RELATIVE
    )


def test_grows_and_makes_way_without_losing_a_step(recipe, undisturbed, cluster, tmp_path) -> None:
    name = "grown"
    first = cluster.add(cpus=0.4)
    driver = begin(recipe, name, cluster, tmp_path)
    wait_for_group(recipe, name, 1, tmp_path)
    cluster.add(cpus=0.8)
    wait_for_group(recipe, name, 2, tmp_path)
    cluster.drain(first, seconds=60)
    assert_finished_alike(driver, recipe, name, tmp_path, undisturbed)
    assert [entry["world_size"] for entry in started(recipe, name)] == [1, 3, 2]
    assert rolled_back(recipe, name) == []
    halts = [e["reason"] for e in entries_of(recipe, name) if e["kind"] == "halted"]
    assert halts == ["resize", "drain"]


def test_a_lost_node_costs_no_more_than_hot_steps(recipe, undisturbed, cluster, tmp_path) -> None:
    name = "node-lost"
    cluster.add(cpus=0.4)
    second = cluster.add(cpus=0.8)
    driver = begin(recipe, name, cluster, tmp_path)
    wait_for_group(recipe, name, 1, tmp_path)
    cluster.kill(second)
    assert_finished_alike(driver, recipe, name, tmp_path, undisturbed)
    assert [entry["state"] for entry in started(recipe, name)] == ["new", "hot"]
    assert [entry["world_size"] for entry in started(recipe, name)] == [3, 1]
    assert sum(rolled_back(recipe, name)) <= HOT_STEPS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_lost_or_hung_worker_costs_no_more_than_hot_steps(
    number, recipe, undisturbed, cluster, tmp_path
) -> None:
    name = f"worker-{number.name}"
    cluster.add(cpus=0.8)
    driver = begin(recipe, name, cluster, tmp_path)
    wait_for_group(recipe, name, 1, tmp_path)
    send(train_workers(cluster.address)[-1], number)
    assert_finished_alike(driver, recipe, name, tmp_path, undisturbed)
    assert [entry["state"] for entry in started(recipe, name)] == ["new", "hot"]
    assert sum(rolled_back(recipe, name)) <= HOT_STEPS
    faults = [entry for entry in entries_of(recipe, name) if entry["kind"] == "fault"]
    assert faults


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupted_driver_saves_first(number, recipe, undisturbed, tmp_path) -> None:
    name = f"driver-{number.name}"
    driver = start("train", recipe, "workers.max=2", "--name", name, log=tmp_path / "log")
    wait_for_group(recipe, name, 1, tmp_path)
    driver.send_signal(number)
    assert driver.wait(timeout=60) == 130, (tmp_path / "log").read_text()
    ended = [entry for entry in entries_of(recipe, name) if entry["kind"] == "ended"]
    assert [entry["status"] for entry in ended] == ["KILLED"]
    done = run_json("train", recipe, "workers.max=1", "--name", name)
    assert done["status"] == "FINISHED"
    assert rolled_back(recipe, name) == []
    assert [s["digest"] for s in steps_of(recipe, name)] == [s["digest"] for s in undisturbed]


def test_a_second_driver_is_refused(recipe, tmp_path) -> None:
    name = "twice"
    driver = start("train", recipe, "--name", name, log=tmp_path / "log")
    wait_for_group(recipe, name, 1, tmp_path)
    second = run("train", recipe, "--name", name)
    assert second.returncode == 2
    assert f"process {driver.pid}" in second.stderr
    driver.send_signal(signal.SIGINT)
    driver.wait(timeout=60)
    identity = json.loads((recipe.parent / "runs" / name / "driver.json").read_text())
    assert identity["released"]
