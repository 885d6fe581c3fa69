"""How many workers there is room for, and on which nodes."""

from __future__ import annotations

import pytest
import ray
from ray.train.v2.api.config import ScalingConfig

from elastrata.launch.ray_session import ray_session
from elastrata.workers.nodes import elsewhere, unreachable
from elastrata.workers.nodes import nodes as all_nodes
from elastrata.workers.resize import ResizePolicy
from support.command import wait_until
from support.nodes import nodes


@pytest.mark.parametrize(
    ("multiple", "by_node", "expected"),
    [
        (1, {"a": 3, "b": 3}, 6),
        (1, {"a": 9}, 8),
        (4, {"a": 3, "b": 3}, 4),
        (4, {"a": 3}, 0),
        (4, {"a": 40}, 8),
        (1, {"a": 2.5, "b": 0.5}, 2),
    ],
)
def test_workers_come_in_multiples_the_rest_wait(ray_local, multiple, by_node, expected) -> None:
    scaling = ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 1})
    policy = ResizePolicy(scaling, None, run="run", multiple=multiple, grace_seconds=1)
    reserved = {node: {"CPU": cpus} for node, cpus in by_node.items()}
    assert policy._count_possible_workers(reserved) == expected


def test_three_times_four_tenths_fit_into_one_and_two_tenths(ray_local) -> None:
    scaling = ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 0.4})
    policy = ResizePolicy(scaling, None, run="run", multiple=1, grace_seconds=1)
    assert policy._count_possible_workers({"a": {"CPU": 0.4 + 0.4 + 0.4}}) == 3


def test_a_killed_node_is_not_counted_on() -> None:
    with nodes() as cluster:
        gone, staying = cluster.add(cpus=1), cluster.add(cpus=1)
        with ray_session(cluster.address):
            wait_until(lambda: ray.cluster_resources().get("CPU") == 2, 30, "two nodes")
            assert unreachable() == frozenset()
            cluster.kill(gone)
            wait_until(lambda: gone.node_id not in _counted_on(), 60, "the end of its raylet")
            assert staying.node_id in _counted_on()

            selector = elsewhere([gone.node_id])
            assert selector == {"ray.io/node-id": f"!in({gone.node_id})"}
            placed = ray.util.placement_group([{"CPU": 1}], bundle_label_selector=[selector])
            ray.get(placed.ready(), timeout=30)
            table = ray.util.placement_group_table(placed)
            assert list(table["bundles_to_node_id"].values()) == [staying.node_id]
    assert elsewhere([]) is None


def _counted_on() -> set[str]:
    """The nodes that Ray takes for alive and that take a connection."""
    alive = {str(node["NodeID"]) for node in all_nodes() if node["Alive"]}
    return alive - unreachable()
