"""Workers keep their processes when others are lost: together, again and again, in the midst."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.command import wait_until
from support.live_run import LiveRun, assert_alike
from support.nodes import Nodes, nodes, send, train_workers
from support.short_steps import HOT_STEPS

LOSSES = 5
MEMORY_BYTES = 32 * 2**20
"""More than a process may grow by over so many losses; a model with its optimizer has far less, so
this is for what is held by mistake: threads and files are counted exactly."""


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with nodes() as cluster:
        yield cluster


def others(cluster: Nodes, known: list[psutil.Process]) -> list[psutil.Process]:
    """Workers that were not among those."""
    return [worker for worker in train_workers(cluster.address) if worker not in known]


@pytest.mark.matrix  # a run of three workers
def test_those_lost_at_once_and_those_that_come_for_them(
    recipe: Path, undisturbed: list[Any], cluster: Nodes, tmp_path: Path
) -> None:
    cluster.add(cpus=3)
    live = LiveRun(recipe, "lost", tmp_path / "log", "--address", cluster.address, "workers.min=3")
    live.wait_for_group(1)
    first = train_workers(cluster.address)
    for worker in first[:2]:
        send(worker, signal.SIGKILL)
    live.wait_for_group(2)
    assert first[2] in train_workers(cluster.address)

    known = train_workers(cluster.address)
    send(first[2], signal.SIGKILL)
    (coming,) = wait_until(lambda: others(cluster, known), 60, "a replacement")
    send(coming, signal.SIGKILL)
    live.end()
    assert_alike(live, undisturbed)
    groups = live.of_kind("started")
    assert [entry["stayed"] for entry in groups[:2]] == [0, 1]
    assert {entry["world_size"] for entry in groups} == {3}
    assert all(lost <= HOT_STEPS for lost in live.rolled_back())


@pytest.mark.matrix  # one loss after the other
def test_one_that_stays_again_and_again_holds_no_more_than_before(
    recipe: Path, undisturbed: list[Any], cluster: Nodes, tmp_path: Path
) -> None:
    cluster.add(cpus=2)
    live = LiveRun(recipe, "kept", tmp_path / "log", "--address", cluster.address, "workers.min=2")
    live.wait_for_group(1)
    stays, lost = train_workers(cluster.address)
    held = []
    for number in range(2, LOSSES + 2):
        known = train_workers(cluster.address)
        send(lost, signal.SIGKILL)
        live.wait_for_group(number)
        (lost,) = others(cluster, known)
        held.append((stays.num_threads(), stays.num_fds(), stays.memory_info().rss))
    live.end()
    assert_alike(live, undisturbed)
    assert [entry["stayed"] for entry in live.of_kind("started")] == [0] + [1] * LOSSES
    assert held[-1][:2] == held[1][:2]
    assert held[-1][2] < held[1][2] + MEMORY_BYTES
