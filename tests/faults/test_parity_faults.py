"""A node is lost whose part of the state lies in a parity of several nodes' parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.live_run import LiveRun, assert_alike
from support.nodes import nodes

PARITY = ("checkpoint.hot_parity=2", "workers.hang_seconds=60")


@pytest.mark.matrix  # a cluster of three nodes
def test_the_rest_goes_on_from_what_follows_from_their_parts(
    recipe: Path, undisturbed: list[Any], tmp_path: Path
) -> None:
    """Three workers on a node each: two of them share a parity, which lies on the third."""
    with nodes() as cluster:
        added = [cluster.add(cpus=1) for _ in range(3)]
        live = LiveRun(recipe, "parity", tmp_path / "log", "--address", cluster.address, *PARITY)
        live.wait_for_size(3, 1, steps=30)
        first = min(added, key=lambda node: node.node_id)  # in the group of two
        cluster.kill(first)
        live.end()
    assert_alike(live, undisturbed)
    started = live.of_kind("started")
    assert [entry["world_size"] for entry in started] == [3, 2]
    assert started[1]["state"] == "hot"
    assert started[1]["step"] > 10
