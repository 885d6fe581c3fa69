"""A node that is slow while a run trains: named, dealt less, and left out where the recipe asks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.busy_neighbours import busy_neighbours
from support.command import wait_until
from support.live_run import LiveRun, assert_alike
from support.nodes import nodes, send, train_workers
from support.synthetic import tiny_recipe, write_data_set

STEPS = 240
SMALL = 192
"""Tokens of a micro-batch on a node with little memory: four samples."""
WIDE = {"name": "bert", "hidden_size": 256, "num_layers": 2, "num_heads": 4}
"""Its passes take longer than a kernel lets a process compute before another one's turn."""


def _recipe(folder: Path) -> Path:
    write_data_set(folder / "data", samples=2000)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        workload=WIDE,
        steps=STEPS,
        batch_size=64,
        parallel={"replicate": "all"},
        micro_batch_tokens=512,
        checkpoint={"every": 1000, "hot_steps": 20},
    )
    values["workers"] |= {
        "max": 2,
        "cpus": 1,
        "resize_seconds": 1,
        "hang_seconds": 120,  # one that has a quarter of its time does not hang
        "speeds": "measured",
        "exclude_slower_than": 0.7,
        "micro_batch_tokens": {"small": SMALL},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


@pytest.mark.slow  # a cluster of two nodes
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="a node is slower than the other on a core of its own"
)
def test_it_is_dealt_less_and_left_out_from_the_next_fault_on(tmp_path: Path) -> None:
    """With one worker on each of two nodes, of which one has little memory."""
    recipe = _recipe(tmp_path)
    with nodes() as cluster:
        cluster.add(cpus=1)
        cluster.add(cpus=1, labels={"ray.io/node-group": "small"})
        live = LiveRun(recipe, "slow", tmp_path / "log", "--address", cluster.address)
        live.wait_for_size(2, 1, steps=12)
        worker = train_workers(cluster.address)[-1]
        with busy_neighbours(worker, 3):
            wait_until(lambda: bool(live.of_kind("slowed")), 240, f"a slow rank\n{live.output}")
            wait_until(lambda: _is_dealt_less(live), 240, f"other hands\n{live.output}")
            send(worker, signal.SIGKILL)
        live.end()
    one = ("workers.max=1", "workers.speeds=equal", "workers.micro_batch_tokens={}")
    alone = LiveRun(recipe, "alone", tmp_path / "log-alone", *one)
    alone.end()
    assert_alike(live, alone.steps())
    assert [entry["world_size"] for entry in live.of_kind("started")] == [2, 1]
    budgets = [step["micro_batch_tokens_by_kind"] for step in live.steps()]
    assert any(len(by_kind) == 2 and min(by_kind.values()) == SMALL for by_kind in budgets)
    named: Any = live.of_kind("slowed")[0]
    assert named["factor"] < 0.7
    assert f"rank {named['rank']} (" in live.output
    assert "left out from the next resize on" in live.output


def _is_dealt_less(live: LiveRun) -> bool:
    """Whether a step has been dealt to the slow rank by less than 0.7 of the other's speed."""
    rank = live.of_kind("slowed")[0]["rank"]
    dealt = [step["speeds"] for step in live.steps() if step.get("speeds")]
    return any(speeds[rank] < 0.7 * max(speeds) for speeds in dealt)
