"""A run's own Ray: its head dies and is replaced; its driver dies and leaves nothing for long."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from elastrata.cluster import ray_processes
from elastrata.launch.doctor import Finding, examine
from support.command import wait_until
from support.forked_workers import own_programs
from support.live_run import LiveRun, assert_alike
from support.nodes import send

GUARDIAN = "elastrata.cluster.ray_processes"


def _session(driver: int) -> dict[int, str]:
    """The processes of the Ray that a driver started for itself, by their command lines."""
    found = {}
    for pid, session in ray_processes._marked():
        if session.driver and session.driver.pid == driver:
            with suppress(psutil.Error):
                found[pid] = " ".join(psutil.Process(pid).cmdline())
    return found


def _of(driver: int, part: str) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid, line in _session(driver).items() if part in line]


def _leftovers() -> Finding:
    return next(f for f in examine(storage=None, tracking=None) if f.name == "leftovers")


@pytest.fixture
def programs_are_rays() -> Iterator[None]:
    """A stopped agent outlives its raylet."""
    with own_programs():
        yield


@pytest.mark.matrix
@pytest.mark.usefixtures("programs_are_rays")
def test_its_head_and_then_its_driver_are_killed(
    recipe: Any, undisturbed: list[Any], tmp_path: Any
) -> None:
    live = LiveRun(recipe, "session", tmp_path / "log", "workers.max=2")
    live.wait_for_group(1)
    driver = live.driver.pid
    workers = _of(driver, "ray::RayTrainWorker")
    assert [worker.nice() for worker in workers] == [0, 0]

    send(_of(driver, "gcs_server")[0], signal.SIGKILL)
    wait_until(lambda: "another one has taken over, nothing is lost" in live.output, 60, "a head")
    live.wait_for_more(steps=50)
    assert live.groups() == 1
    live.wait_for_checkpoint()

    # What outlives the others by half a minute is stopped, and nobody is left who would end it.
    (agent,) = _of(driver, "ray::RuntimeEnvAgent")
    (guardian,) = (p for p in psutil.Process(driver).children() if GUARDIAN in p.cmdline())
    send(guardian, signal.SIGKILL)
    live.send(signal.SIGKILL)
    live.driver.wait()
    send(agent, signal.SIGSTOP)
    wait_until(lambda: list(_session(driver)) == [agent.pid], 90, "the ends of the others")
    assert f"that process {driver} left behind: {agent.pid}" in _leftovers().found
    assert _leftovers().advice == "elastrata doctor --clean ends them"

    again = LiveRun(recipe, "session", tmp_path / "again", "workers.max=2")
    again.wait_for_group(1)
    assert f"ended 1 processes of Ray's that process {driver} left behind" in again.output
    assert _session(driver) == {}
    again.end()
    assert_alike(again, undisturbed)
    assert [entry["state"] for entry in again.of_kind("started")] == ["new", "durable"]
