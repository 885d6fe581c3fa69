"""Actors on chosen nodes of a cluster that this process is a driver of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from support.nodes import Nodes, nodes

_SECONDS_TO_ANSWER = 500.0


@contextmanager
def driver_of_nodes() -> Iterator[Nodes]:
    """A cluster with this process as a driver on its head; its workers can import tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with nodes() as cluster:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            try:
                yield cluster
            finally:
                ray.shutdown()


def head_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def on_node(node_id: str, actor: Any, *args: Any) -> Any:
    """Handle of an actor that runs on a node and claims nothing."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0)(actor).options(scheduling_strategy=strategy).remote(*args)


def answers(*calls: Any) -> list[Any]:
    """What calls of actors have returned."""
    return list(ray.get(list(calls), timeout=_SECONDS_TO_ANSWER))
