"""Parity of the parts of several nodes: who is with whom, and what follows from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata.replicas.parity import Parity, ParityPlan, rebuildable
from elastrata.replicas.store import CHUNK_BYTES, ReplicaStore, most_per_node

NODES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=24).map(tuple)
PLANS = st.builds(ParityPlan, NODES, st.integers(2, 10)).filter(lambda plan: plan.is_needed)
FOLDER = "000000001-0001-0a1b2c"
Store = ReplicaStore.__ray_metadata__.modified_class  # type: ignore[attr-defined]


def path_of(rank: int) -> str:
    return f"{FOLDER}/__{rank}_0.distcp"


@given(PLANS)
def test_a_parity_has_one_file_of_a_node_and_lies_on_none_of_these(plan: ParityPlan) -> None:
    members: dict[str, list[str]] = {}
    for rank, node in enumerate(plan.nodes):
        name = plan.name(rank, path_of(rank))
        assert name is not None
        assert name.startswith(f"{FOLDER}/")
        members.setdefault(name, []).append(node)
        assert node not in plan.outside(node)
        assert {plan.host(node, chunk) for chunk in range(50)} == {*plan.outside(node)}
    for nodes in members.values():
        assert len(set(nodes)) == len(nodes) <= plan.size
        assert all(set(nodes).isdisjoint(plan.outside(node)) for node in nodes)
    assert plan.name(0, f"{FOLDER}/.metadata") is None


@given(NODES, st.integers(1, 10))
def test_few_nodes_have_copies(nodes: tuple[str, ...], size: int) -> None:
    assert ParityPlan(nodes, size).is_needed == (len(set(nodes)) > 2 and size > 1)


def test_the_room_for_second_copies_is_divided() -> None:
    part = 64 * CHUNK_BYTES
    parts = [(f"node-{number:02}", part) for number in range(16)]
    copies = most_per_node(parts)
    assert copies == 2 * 2 * part
    for size in (2, 4, 8):
        second = most_per_node(parts, size) / 2 - part
        assert 1 / size <= second / part <= 1.3 / size  # chunks go to nodes whole
    assert most_per_node(parts[:2], 8) == most_per_node(parts[:2])


def test_what_is_lost_is_the_parity_of_the_rest() -> None:
    """One store holds the parity of four nodes' files, which arrive in turns."""
    store, draw = Store(2**30), np.random.default_rng(0)
    sizes = [CHUNK_BYTES + 5, 7, 2 * CHUNK_BYTES, 0]
    contents = [draw.integers(0, 256, size).astype(np.uint8) for size in sizes]
    for index in range(2):
        for rank, content in enumerate(contents):
            chunk = content[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            if chunk.nbytes:
                store.fold("p", path_of(rank), index, chunk)
    assert store.contents().parities["p"].chunks == ()
    for rank, size in enumerate(sizes):
        store.seal("p", path_of(rank), size, range(-(-size // CHUNK_BYTES)))

    held = store.contents().parities["p"]
    assert held == Parity({path_of(n): size for n, size in enumerate(sizes)}, (0, 1))
    assert store.used() == 2 * CHUNK_BYTES
    others = [path_of(n) for n in (0, 1, 3)]
    (found,) = rebuildable(others, {"host": {"p": held}}, CHUNK_BYTES).items()
    assert found[0] == path_of(2)
    assert (found[1].size, [*found[1].others]) == (2 * CHUNK_BYTES, others)
    rebuilt = store.parity_chunk("p", 0)
    for content in (contents[0][:CHUNK_BYTES], contents[1]):
        rebuilt[: content.nbytes] ^= content
    assert (rebuilt == contents[2][:CHUNK_BYTES]).all()
    store.delete(path_of(1))
    assert store.contents().parities == {}
    assert store.used() == 0


def test_two_that_are_lost_are_lost() -> None:
    held = Parity({path_of(n): 5 for n in range(3)}, (0,))
    assert rebuildable([path_of(0)], {"host": {"p": held}}, CHUNK_BYTES) == {}
    assert rebuildable([path_of(n) for n in range(3)], {"host": {"p": held}}, CHUNK_BYTES) == {}


def test_a_part_without_its_parity_is_lost() -> None:
    """Of two chunks the second one's host is gone."""
    held = Parity({path_of(0): CHUNK_BYTES + 1, path_of(1): 3}, (0,))
    there = {"host": {"p": held}}
    assert rebuildable([path_of(1)], there, CHUNK_BYTES) == {}
    assert [*rebuildable([path_of(0)], there, CHUNK_BYTES)] == [path_of(1)]


def test_a_file_that_is_broken_off_takes_its_parity_along() -> None:
    store = Store(2**20)
    store.fold("p", path_of(0), 0, np.ones(3, np.uint8))
    with pytest.raises(OSError, match="1 of 2 chunks"):
        store.seal("p", path_of(0), 2 * CHUNK_BYTES, (0, 1))
    store.delete(path_of(0))
    assert store.used() == 0


def test_a_store_takes_no_more_parity_than_it_has_room_for() -> None:
    store = Store(2**10)
    with pytest.raises(OSError, match="no room"):
        store.fold("p", path_of(0), 0, np.ones(2**10 + 1, np.uint8))
