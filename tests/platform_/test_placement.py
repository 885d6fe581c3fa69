"""Which node each worker is placed on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train.v2.api.config import ScalingConfig

from elastrata.cluster.placement import in_order, place, split_groups, split_line
from elastrata.cluster.ray_train_internals import label_selectors
from elastrata.cluster.scaling_policy import GracefulScalingPolicy

ROOMS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9), min_size=1)


@given(ROOMS, st.integers(1, 4), st.integers(1, 16))
def test_no_node_has_more_than_its_room_and_whole_groups_stay_whole(
    rooms: dict[str, int], tensor: int, groups: int
) -> None:
    workers = groups * tensor
    placed = place(rooms, workers, tensor)
    assert (placed is None) == (sum(rooms.values()) < workers)
    if placed is None:
        return
    assert len(placed) == workers
    assert all(placed.count(node) <= room for node, room in rooms.items())
    changes = sum(one != other for one, other in pairwise(placed))
    assert changes == len(set(placed)) - 1  # ranks go node by node
    whole = sum(room // tensor for room in rooms.values())
    if whole >= groups:
        assert split_groups(placed, tensor) == 0


def test_a_group_is_split_only_where_no_node_has_room() -> None:
    assert place({"a": 3, "b": 4}, 4, 2) == ["a", "a", "b", "b"]
    assert place({"a": 3, "b": 3}, 6, 2) == ["a", "a", "a", "b", "b", "b"]
    assert place({"a": 3, "b": 4, "c": 1}, 8, 2) == [*"bbbb", *"aaa", "c"]
    assert place({"a": 1}, 2, 2) is None
    assert split_line([*"bbbb", *"aaa", "c"], 2).startswith(
        "parallel.tensor: 2: 1 of 4 groups have"
    )
    assert split_line([*"aabb"], 2) == ""


def test_nodes_of_one_kind_follow_each_other() -> None:
    rooms, peaks = {"a": 4, "b": 8, "c": 4, "d": 8}, {"a": 312.0, "c": 312.0, "b": 65.0, "d": 65.0}
    assert list(in_order(rooms, peaks, fastest_first=True)) == ["a", "c", "b", "d"]
    assert list(in_order(rooms, peaks, fastest_first=False)) == ["b", "d", "a", "c"]


def _policy(tensor: int, pipeline: int = 1) -> GracefulScalingPolicy:
    scaling = ScalingConfig(num_workers=(2, 8), resources_per_worker={"CPU": 1})
    return GracefulScalingPolicy(
        scaling, None, run="run", multiple=tensor * pipeline, grace_seconds=1, tensor=tensor
    )


@pytest.mark.parametrize(
    ("cpus", "expected"), [((3, 3), 4), ((1, 1), 2), ((4, 3, 3), 8), ((9, 1), 8)]
)
def test_a_worker_that_would_split_a_group_waits_where_the_run_has_enough(cpus, expected) -> None:
    reserved = {str(node): {"CPU": float(count)} for node, count in enumerate(cpus)}
    assert _policy(2)._count_possible_workers(reserved) == expected


def test_ray_copies_a_selector_of_its_own_for_every_worker() -> None:
    selectors = [{"ray.io/node-id": node} for node in "aab"]
    returned = label_selectors(selectors)
    assert [returned.copy() for _ in range(3)] == selectors


def test_a_group_that_did_not_start_is_placed_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _policy(2)
    reserved = {"a": {"CPU": 3.0}, "b": {"CPU": 4.0}}
    monkeypatch.setattr(policy, "_get_reserved_resources", lambda: reserved)
    scaling = policy.scaling_config

    def selectors() -> list[dict[str, str]] | None:
        one = policy.on_controller_start_worker_group(scaling_config=scaling, num_workers=6)
        return one and [one.copy() for _ in range(6)]

    assert selectors() == [{"ray.io/node-id": node} for node in "bbbbaa"]
    assert selectors() is None
    assert selectors() == [{"ray.io/node-id": node} for node in "bbbbaa"]
