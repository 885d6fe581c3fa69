"""A node that is slow while a run trains: named, dealt less, and left out where the recipe asks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from support.command import wait_until
from support.live_run import LiveRun, assert_alike
from support.nodes import nodes, send, train_workers
from support.throttled import throttled

SLOW = (
    "workers.speeds=measured",
    "workers.exclude_slower_than=0.7",
    "workers.hang_seconds=120",  # one that is held to a third of its time does not hang
)
SMALL = ("micro_batch_tokens=auto", "workers.micro_batch_tokens={small: 96}")
"""A node group with room for two samples at a time."""


@pytest.mark.slow  # a cluster of two nodes
def test_it_is_dealt_less_and_left_out_from_the_next_fault_on(
    recipe: Path, undisturbed: list[Any], tmp_path: Path
) -> None:
    """With one worker on each of two nodes, of which one has little memory."""
    with nodes() as cluster:
        cluster.add(cpus=1)
        cluster.add(cpus=1, labels={"ray.io/node-group": "small"})
        where = ("--address", cluster.address)
        live = LiveRun(recipe, "slow-node", tmp_path / "log", *where, *SLOW, *SMALL)
        live.wait_for_size(2, 1, steps=20)
        worker = train_workers(cluster.address)[-1]
        with throttled(worker, 0.3):
            wait_until(lambda: bool(live.of_kind("slowed")), 240, f"a slow rank\n{live.output}")
            wait_until(lambda: _is_dealt_less(live), 240, f"other hands\n{live.output}")
            send(worker, signal.SIGKILL)
        live.end()
    assert_alike(live, undisturbed)
    assert [entry["world_size"] for entry in live.of_kind("started")] == [2, 1]
    budgets = [step["micro_batch_tokens_by_kind"] for step in live.steps()]
    assert any(len(one) == 2 and min(one.values()) == 96 for one in budgets), budgets
    named = live.of_kind("slowed")[0]
    assert named["factor"] < 0.7
    assert f"rank {named['rank']} (" in live.output
    assert "left out from the next resize on" in live.output


def _is_dealt_less(live: LiveRun) -> bool:
    """Whether a step has been dealt to the slow rank by less than 0.7 of the other's speed."""
    rank = live.of_kind("slowed")[0]["rank"]
    dealt = [step["speeds"] for step in live.steps() if step.get("speeds")]
    return any(speeds[rank] < 0.7 * max(speeds) for speeds in dealt)
