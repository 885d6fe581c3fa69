"""Autoscaling, really: Ray's autoscaler starts and stops the nodes that runs ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.autoscaled import FIRST_NODE, MOST_NODES, autoscaled, grown
from support.command import run, wait_until
from support.live_run import LiveRun
from support.served import Served
from support.short_steps import write_recipe

pytestmark = pytest.mark.slow
STEPS = 3000
SETTINGS = ("workers.max=8", "workers.cpus=2", "workers.gpus=0")
"""More than there can ever be: the autoscaler would launch nothing for that."""


def _world_sizes(live: LiveRun) -> list[int]:
    return [entry["world_size"] for entry in live.of_kind("started")]


def _assert_whole(live: LiveRun, name: str, runs: Path, steps: int) -> None:
    """Every step was done once, on the samples that it has at any size."""
    assert live.rolled_back() == []
    assert [step["step"] for step in live.steps()] == list(range(1, steps + 1))
    audit = run("audit", runs / name)
    assert audit.returncode == 0, audit.stdout


@pytest.mark.timeout(900)
def test_a_run_grows_to_what_the_file_allows_and_makes_way(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    with autoscaled() as cluster:
        where = ("--address", cluster.gcs_address)
        live = LiveRun(recipe, "auto", tmp_path / "log", *where, *SETTINGS)
        live.wait_for_size(MOST_NODES, number=2, steps=100, seconds=400)
        assert grown(live, cluster)
        drained = run("guard", "--now", "100", *where, "--node", FIRST_NODE)
        assert drained.returncode == 0, drained.stderr
        live.end()
    sizes = _world_sizes(live)
    assert sizes[0] == 1
    assert max(sizes) == MOST_NODES
    assert MOST_NODES - 1 in sizes[sizes.index(MOST_NODES) :]
    assert "drain" in [entry["reason"] for entry in live.of_kind("halted")]
    _assert_whole(live, "auto", tmp_path / "runs", STEPS)


def _alive(cluster: Served) -> int:
    return sum(not node["is_head_node"] for node in cluster.nodes() if node["state"] == "ALIVE")


@pytest.mark.timeout(900)
def test_two_runs_share_what_the_file_allows(tmp_path: Path) -> None:
    """Together they want more than twice of it, and neither waits for the other to end."""
    steps = STEPS // 2
    recipe = write_recipe(tmp_path, steps=steps)
    names = ("one", "two")
    with autoscaled() as cluster:
        where = ("--address", cluster.gcs_address)
        lives = {name: LiveRun(recipe, name, tmp_path / name, *where, *SETTINGS) for name in names}
        for live in lives.values():
            live.wait_for_group(1, steps=50, seconds=400)
        assert all(live.driver.poll() is None for live in lives.values())
        most = 0

        def have_ended() -> bool:
            nonlocal most
            most = max(most, _alive(cluster))
            return all(live.driver.poll() is not None for live in lives.values())

        wait_until(have_ended, 400, "both runs")
        for live in lives.values():
            live.end()
    assert 2 <= most <= MOST_NODES
    for name, live in lives.items():
        assert max(_world_sizes(live)) <= MOST_NODES
        _assert_whole(live, name, tmp_path / "runs", steps)
