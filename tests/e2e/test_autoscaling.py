"""Autoscaling, really: Ray's autoscaler starts and stops the nodes that runs ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.autoscaled import (
    MOST_NODES,
    SETTINGS,
    STEPS,
    autoscaled,
    grown,
    make_way,
    world_sizes,
)
from support.command import run, wait_until
from support.live_run import LiveRun
from support.served import Served
from support.short_steps import write_recipe

pytestmark = pytest.mark.timeout(1200)


def _assert_whole(live: LiveRun, run_dir: Path) -> None:
    """Every step was done once, on the samples that it has at any size."""
    assert live.rolled_back() == []
    steps = [step["step"] for step in live.steps()]
    assert steps == list(range(1, len(steps) + 1))
    audit = run("audit", run_dir)
    assert audit.returncode == 0, audit.stdout


def test_a_run_grows_to_what_the_file_allows_and_makes_way(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    with autoscaled() as cluster:
        where = ("--address", cluster.gcs_address)
        live = LiveRun(recipe, "auto", tmp_path / "log", *where, *SETTINGS)
        live.wait_for_size(MOST_NODES, number=2, steps=20, seconds=400)
        growths = grown(live, cluster)
        make_way(live, cluster)
        live.interrupt()
    sizes = world_sizes(live)
    assert sizes[0] == 1
    assert growths[-1].larger == max(sizes) == MOST_NODES
    assert "drain" in [entry["reason"] for entry in live.of_kind("halted")]
    _assert_whole(live, tmp_path / "runs" / "auto")


def _alive(cluster: Served) -> int:
    return sum(not node["is_head_node"] for node in cluster.nodes() if node["state"] == "ALIVE")


@pytest.mark.matrix
def test_two_runs_share_what_the_file_allows(tmp_path: Path) -> None:
    """Together they want five times of it, and neither waits for the other to end."""
    recipe = write_recipe(tmp_path, steps=STEPS)
    with autoscaled() as cluster:
        where = ("--address", cluster.gcs_address)
        lives = [
            LiveRun(recipe, name, tmp_path / name, *where, *SETTINGS) for name in ("one", "two")
        ]
        for live in lives:
            live.wait_for_group(1, steps=20, seconds=400)

        def have_all() -> bool:
            assert all(live.driver.poll() is None for live in lives)
            assert _alive(cluster) <= MOST_NODES
            return sum(world_sizes(live)[-1] for live in lives) == MOST_NODES

        wait_until(have_all, 400, "all nodes at work")
        for live in lives:
            live.interrupt()
    for live, name in zip(lives, ("one", "two"), strict=True):
        _assert_whole(live, tmp_path / "runs" / name)
