"""A cluster whose nodes Ray's autoscaler starts and stops, as `raylets.yaml` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
import yaml

from elastrata.shipped import cluster_files
from support.command import run, wait_until
from support.live_run import LiveRun
from support.served import Served, served

MOST_NODES = 3
"""Beside the head."""
STEPS = 100_000
"""More than there is time for: runs are interrupted when all has been seen."""
SETTINGS = (
    *("workers.max=8", "workers.cpus=2", "workers.gpus=0"),
    *("workers.hang_seconds=300", "checkpoint.grace_seconds=300"),
)
"""A worker for each node, and more than there can ever be: the autoscaler would launch nothing for
that. Time enough to save on the slowest machine."""
FIRST_NODE = "f" * 51 + "00001"
"""The id that Ray's provider of nodes on one machine gives to the first node."""


@dataclass(frozen=True)
class Growth:
    """A group of workers that made way for a larger one."""

    workers: int
    larger: int
    seconds: float
    """From the start of the node that the first of the added workers needed until the smaller group
    had saved its state and halted."""


@contextmanager
def autoscaled() -> Iterator[Served]:
    """A cluster that starts with one node beside the head; the environment lets clients in."""
    launcher = yaml.safe_load((cluster_files() / "raylets.yaml").read_text(encoding="utf-8"))
    launcher["available_node_types"]["small"]["min_workers"] = 1
    with served(launcher) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.settings.items():
            patch.setenv(name, value)
        yield cluster


def world_sizes(live: LiveRun) -> list[int]:
    """Of all its groups of workers so far, in order."""
    return [entry["world_size"] for entry in live.of_kind("started")]


def make_way(live: LiveRun, cluster: Served) -> None:
    """Drains the first node, as its guard would, and waits until the run has left it and goes on:
    on the other nodes, or on one more where Ray's autoscaler has already replaced it."""
    where = ("--address", cluster.gcs_address, "--node", FIRST_NODE)
    drained = run("guard", "--now", "100", *where)
    assert drained.returncode == 0, drained.stderr

    def has_left() -> bool:
        drains = [halt["time"] for halt in live.of_kind("halted") if halt["reason"] == "drain"]
        started = live.of_kind("started")[-1]
        return bool(drains) and started["time"] > drains[0]

    wait_until(has_left, 300, "a group of workers after the drain")
    assert world_sizes(live)[-1] in (MOST_NODES - 1, MOST_NODES)
    live.wait_for_more(steps=3)


def grown(live: LiveRun, cluster: Served) -> list[Growth]:
    """How a run of one worker per node has grown so far."""
    joined = sorted(
        node["start_time_ms"] / 1000 for node in cluster.nodes() if not node["is_head_node"]
    )
    halted = [entry for entry in live.of_kind("halted") if entry["reason"] == "resize"]
    found = []
    for before, after in pairwise(live.of_kind("started")):
        if after["world_size"] > before["world_size"]:
            (halt,) = (e for e in halted if before["time"] < e["time"] < after["time"])
            seconds = halt["time"] - joined[before["world_size"]]
            found.append(Growth(before["world_size"], after["world_size"], seconds))
    return found
