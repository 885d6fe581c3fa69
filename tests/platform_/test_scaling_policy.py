"""How many workers there is room for, and on which nodes."""

from __future__ import annotations

import pytest
from ray.train.v2.api.config import ScalingConfig

from elastrata.cluster.scaling_policy import GracefulScalingPolicy


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
def test_workers_come_in_multiples_the_rest_wait(multiple, by_node, expected) -> None:
    scaling = ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 1})
    policy = GracefulScalingPolicy(scaling, None, run="run", multiple=multiple, grace_seconds=1)
    reserved = {node: {"CPU": cpus} for node, cpus in by_node.items()}
    assert policy._count_possible_workers(reserved) == expected


def test_three_times_four_tenths_fit_into_one_and_two_tenths() -> None:
    scaling = ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 0.4})
    policy = GracefulScalingPolicy(scaling, None, run="run", multiple=1, grace_seconds=1)
    assert policy._count_possible_workers({"a": {"CPU": 0.4 + 0.4 + 0.4}}) == 3
