"""A run's own Ray: its driver or its head process is killed; the same command continues it."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.command import wait_until
from support.forked_workers import own_processes
from support.live_run import LiveRun, assert_alike
from support.nodes import send

SECONDS_TO_END = 60
LOST = "Ray has stopped (its head process died; logs: "


@pytest.fixture(autouse=True)
def programs_of_their_own() -> Iterator[None]:
    """A fork of the tests ends with the program in whose place it runs."""
    with own_processes():
        yield


def _below(driver: int) -> list[psutil.Process]:
    """Return the processes of the Ray that a driver started for itself."""
    return psutil.Process(driver).children(recursive=True)


def _wait_for_ends(processes: list[psutil.Process]) -> None:
    wait_until(
        lambda: not any(map(_runs, processes)), SECONDS_TO_END, "the ends of Ray's processes"
    )


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _continue(recipe: Path, name: str, log: Path, undisturbed: list[Any]) -> None:
    again = LiveRun(recipe, name, log, "workers.max=2")
    again.end()
    assert_alike(again, undisturbed)
    assert [entry["state"] for entry in again.of_kind("started")] == ["new", "durable"]
    assert any("the driver died" in entry["text"] for entry in again.of_kind("fault"))


@pytest.mark.matrix
def test_nothing_outlives_a_killed_driver_by_a_minute(
    recipe: Path, undisturbed: list[Any], tmp_path: Path
) -> None:
    live = LiveRun(recipe, "driver", tmp_path / "log", "workers.max=2")
    live.wait_for_group(1)
    live.wait_for_checkpoint()
    processes = _below(live.driver.pid)
    titles = [" ".join(process.cmdline()) for process in processes]
    workers = [title for title in titles if title.startswith("ray::RayTrainWorker")]
    assert len(workers) == 2
    assert any(title.startswith("ray::DashboardAgent") for title in titles)
    live.send(signal.SIGKILL)
    live.driver.wait()
    _wait_for_ends(processes)
    _continue(recipe, "driver", tmp_path / "again", undisturbed)


@pytest.mark.matrix
def test_a_dead_head_process_ends_the_command_with_one_line(
    recipe: Path, undisturbed: list[Any], tmp_path: Path
) -> None:
    live = LiveRun(recipe, "head", tmp_path / "log", "workers.max=2")
    live.wait_for_group(1)
    live.wait_for_checkpoint()
    processes = _below(live.driver.pid)
    (head,) = (process for process in processes if "gcs_server" in process.name())
    send(head, signal.SIGKILL)
    assert live.driver.wait(SECONDS_TO_END) == 1
    last = live.output.splitlines()[-1]
    assert last.startswith(LOST)
    assert last.endswith("; the same command continues the run")
    _wait_for_ends(processes)
    logs = re.search(r"logs: (\S+)\)", last)
    assert logs
    assert Path(logs[1]).is_dir()
    shutil.rmtree(Path(logs[1]).parents[1])
    _continue(recipe, "head", tmp_path / "again", undisturbed)
