"""The hot tier on clusters of several nodes: what survives which death, what is never offered."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastrata.checkpoints.commit import (
    MARKER,
    Commit,
    FileRecord,
    FolderName,
    file_problems,
    list_commits,
)
from elastrata.checkpoints.replicas import replicas as storage_module
from elastrata.checkpoints.replicas.registry import ring_from
from elastrata.checkpoints.replicas.replicas import (
    Replicas,
    close_replicas,
    find_newest_replica,
    open_replicas,
)
from elastrata.checkpoints.replicas.store import CHUNK_BYTES
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import load
from elastrata_pipelines.storage import Storage
from support.actors import answers, driver_of_nodes, head_id, on_node
from support.hot_ranks import DeadlyHotStorage, Rank
from support.hot_writer import SECONDS, Writer
from support.nodes import Nodes

LIMIT_BYTES = 100 * 2**20
SHARDS = ("__0_0.distcp", "__1_0.distcp")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with driver_of_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def writers(nodes: Nodes) -> list[Any]:
    """One on the head, one on a second node that stays."""
    return [on_node(node, Writer) for node in (head_id(), nodes.add(0).node_id)]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_ANSWER_SECONDS", SECONDS)
    monkeypatch.setattr(storage_module, "_CHUNK_SECONDS", SECONDS)


@pytest.fixture
def storage(nodes: Nodes) -> Iterator[Replicas]:
    opened = open_replicas(LIMIT_BYTES, SECONDS)
    yield opened
    close_replicas(opened)


def folder_of(step: int, attempt: int = 1) -> str:
    return str(FolderName(attempt, step, "0a1b2c"))


def put(storage: Replicas, writers: list[Any], step: int) -> Commit:
    """A commit of which every writer writes a shard."""
    folder, content = folder_of(step), b"shard of step %d" % step
    answers(
        *(
            writer.write.remote(storage, content, folder, name)
            for writer, name in zip(writers, SHARDS, strict=True)
        )
    )
    record = FileRecord(size=len(content), sha256=None)
    files = dict.fromkeys(SHARDS, record)
    commit = Commit(folder=folder, step=step, samples=0, tokens=0, extra={}, files=files)
    answers(writers[0].write.remote(storage, commit.to_json(), folder, MARKER))
    return commit


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def break_off(storage: Replicas, data: bytes) -> None:
    with storage.create("a", "torn") as stream:
        stream.write(data)
        raise ZeroDivisionError


def test_files_are_whole_or_not_there(storage: Replicas) -> None:
    large = os.urandom(2 * CHUNK_BYTES) + b"tail"
    storage.write(large, "a", "large")
    storage.write(b"", "a", "b", "empty")
    with pytest.raises(ZeroDivisionError):
        break_off(storage, large)

    assert storage.names("a") == ["b", "large"]
    assert storage.names() == ["a"]
    assert storage.names("nothing") == []
    assert storage.size("a", "large") == len(large)
    assert storage.read("a", "large") == large
    assert storage.read("a", "b", "empty") == b""
    with storage.open("a", "large") as stream:
        stream.seek(-4, os.SEEK_END)
        assert stream.read() == b"tail"
    assert storage.exists("a", "b")
    assert not storage.exists("a", "lar")
    with pytest.raises(FileNotFoundError, match="hot:a/lar"):
        storage.read("a", "lar")

    storage.delete("a", "b")
    storage.delete("a", "b")
    assert storage.names("a") == ["large"]
    storage.delete("a")
    assert storage.names() == []
    assert set(storage.usage().values()) == {0}


def test_stores_that_start_slowly_are_waited_for(
    storage: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "_FIRST_LOOK_SECONDS", 0.0)
    storage.write(b"late", folder_of(1), SHARDS[0])
    assert storage.read(folder_of(1), SHARDS[0]) == b"late"


def test_a_node_removed_takes_nothing_along(storage: Replicas, nodes: Nodes) -> None:
    leaving = nodes.add(0)
    writers = [on_node(node, Writer) for node in (head_id(), leaving.node_id)]
    commit = put(storage, writers, 7)
    nodes.kill(leaving)
    assert find_newest_replica(storage) == commit
    assert [storage.read(commit.folder, name) for name in SHARDS] == [b"shard of step 7"] * 2


def test_what_is_incomplete_is_never_offered(storage: Replicas, writers: list[Any]) -> None:
    assert find_newest_replica(storage) is None
    older = put(storage, writers, 1)
    newer = put(storage, writers, 2)
    assert find_newest_replica(storage) == newer
    storage.delete(newer.folder, SHARDS[0])
    storage.write(b"half", folder_of(3), SHARDS[0])
    assert find_newest_replica(storage) == older
    storage.delete(older.folder, MARKER)
    assert find_newest_replica(storage) is None


@given(
    st.sets(st.sampled_from("abcdefgh"), min_size=1),
    st.sets(st.sampled_from("abcdefgh"), min_size=1),
)
def test_the_ring_gives_every_writer_another_node(alive: set[str], writing: set[str]) -> None:
    rings = {node: ring_from(node, alive | writing, writing) for node in writing}
    for node, ring in rings.items():
        assert node not in ring
        assert bool(ring) == (len(alive | writing) > 1)
    if len(writing) > 1:
        assert {ring[0] for ring in rings.values()} == writing


def test_a_driver_opens_a_tier_without_torch() -> None:
    check = "import sys, elastrata.checkpoints.replicas.replicas; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_lean_commit_keeps_every_kind_of_value(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    state: dict[str, Any] = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "plain": {"betas": (0.9, 0.95)},
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        saver = DurableSaver(storage, keep_last=1, keep_best=False, warn=pytest.fail, lean=True)
        for step in (1, 2, 3):
            if step == 3:  # another layout than the one that was planned for
                state["half"] = torch.arange(8).reshape(2, 4).to(torch.bfloat16)
            saver.save(state, step=step, samples=0, tokens=0)
        saver.close()
        (commit,) = list_commits(storage)
        found = {
            name: torch.zeros_like(value) if isinstance(value, Tensor) else {"betas": None}
            for name, value in state.items()
        }
        load(storage, commit, found)
    finally:
        dist.destroy_process_group()
    assert {record.sha256 for record in commit.files.values()} == {None}
    assert not file_problems(storage, commit)
    assert found.pop("plain") == state.pop("plain")
    assert_equal(found, state)


class Group:
    """Ranks of a training, one to a node as far as the nodes go."""

    def __init__(self, nodes: list[str], world_size: int, folder: Path) -> None:
        rendezvous = str(folder / f"rendezvous{world_size}{time.monotonic_ns()}")
        self.ranks = [
            on_node(nodes[rank % len(nodes)], Rank, rank, world_size, rendezvous)
            for rank in range(world_size)
        ]

    def all(self, method: str, *args: Any) -> list[Any]:
        return answers(*(getattr(rank, method).remote(*args) for rank in self.ranks))

    def kill(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.matrix  # six ranks
def test_state_of_two_ranks_loads_at_other_numbers(
    storage: Replicas, nodes: Nodes, tmp_path: Path
) -> None:
    both = [head_id(), nodes.add(0).node_id]
    group = Group(both, 2, tmp_path)
    group.all("begin", storage, 4)
    states = [group.all("save", step)[0] for step in (1, 2, 3)]
    assert group.all("warnings") == [[], []]
    group.kill()

    commit = find_newest_replica(storage)
    assert commit is not None
    assert (commit.step, commit.samples) == (3, 18)
    assert storage.names() == [commit.folder]
    assert commit.folder.startswith("000000003-0004-")
    for world_size in (1, 3):
        other = Group(both, world_size, tmp_path)
        for restored in other.all("restore", storage, commit):
            assert_equal(restored, states[-1])
        other.kill()


@pytest.mark.matrix  # a rank
def test_a_full_store_costs_a_copy_and_not_the_run(nodes: Nodes, tmp_path: Path) -> None:
    storage = open_replicas(1000)
    group = Group([head_id()], 1, tmp_path)
    group.all("begin", storage, 1)
    group.all("save", 1)
    ((warning,),) = group.all("warnings")
    assert warning.startswith("hot copy of step 1 failed, training continues: rank 0: OSError: no ")
    assert find_newest_replica(storage) is None
    until(lambda: set(storage.usage().values()) == {0})
    group.all("save", 2)
    group.kill()
    close_replicas(storage)


@pytest.mark.matrix  # three ranks
def test_a_writer_killed_between_two_files_leaves_the_copy_before(
    storage: Replicas, nodes: Nodes, tmp_path: Path
) -> None:
    group = Group([head_id()], 2, tmp_path)
    group.all("begin", storage, 1)
    (state, _) = group.all("save", 1)
    group.all("end")
    answers(
        *(
            rank.begin.remote(kind(storage.registry), 2)
            for rank, kind in zip(group.ranks, (Replicas, DeadlyHotStorage), strict=True)
        )
    )
    survivor, victim = [rank.save.remote(2) for rank in group.ranks]
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(victim)
    until(lambda: len(storage.names()) == 2)
    commit = find_newest_replica(storage)
    assert commit is not None
    assert commit.step == 1
    del survivor
    group.kill()

    next_group = Group([head_id()], 1, tmp_path)
    next_group.all("begin", storage, 3)
    (restored,) = next_group.all("restore", storage, commit)
    assert_equal(restored, state)
    next_group.all("save", 2)
    assert [name[:14] for name in storage.names()] == ["000000002-0003"]
    next_group.kill()
