"""Rows of nodes: what a node's ranks share, over real sockets and between real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from elastrata_pipelines.node_rows import (
    DamagedRowError,
    FeederLostError,
    NodeRow,
    Origin,
    RowServer,
    SharedRows,
    join_by_node,
    parts_from,
    ranks_of_nodes,
)

ORIGIN = Origin(stream="one", num_ranks=8, ranks=(2, 3), first_step=10, num_steps=4)


def _part(*key: int, size: int = 100) -> pa.Buffer:
    return pa.py_buffer(np.random.default_rng(key).bytes(size + key[-1]))


def _row(group: int, **changes: Any) -> NodeRow:
    origin = replace(ORIGIN, first_step=group, **changes)
    return NodeRow.joined(origin, [_part(group, rank) for rank in origin.ranks])


def _tables(groups: int) -> Iterator[pa.Table]:
    return (_row(group).to_table() for group in range(groups))


@pytest.mark.parametrize("sizes", [(5,), (5, 64, 1, 0, 200), (0,), (0, 0)])
def test_parts_come_out_as_they_went_in(sizes) -> None:
    parts = [_part(n, size=size) if size else pa.py_buffer(b"") for n, size in enumerate(sizes)]
    origin = replace(ORIGIN, ranks=tuple(range(3, 3 + len(sizes))))
    row = NodeRow.from_table(NodeRow.joined(origin, parts).to_table(), "n")
    assert row.origin == origin
    memory = np.frombuffer(row.payload, np.uint8)
    for rank, part in zip(origin.ranks, parts, strict=True):
        taken = row.part(rank)
        assert taken.equals(part)
        assert (taken.address - row.payload.address) % 64 == 0
        assert not part.size or np.shares_memory(np.frombuffer(taken, np.uint8), memory)


def test_a_payload_cut_short_is_an_error() -> None:
    row = _row(10)
    short = replace(row, payload=row.payload.slice(0, row.payload.size - 65))
    with pytest.raises(DamagedRowError) as refused:
        SharedRows(iter([short.to_table()]), node="n7").take(0)
    assert str(refused.value) == (
        "node n7, steps 11 to 14 of ranks 2, 3 of 8: its payload has 191 bytes, its parts have 231"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_ranks": 4}, "got steps 2 to 5 of ranks 2, 3 of 4 of stream one, expected ranks"),
        ({"ranks": (2, 4)}, "got steps 2 to 5 of ranks 2, 4 of 8 of stream one, expected ranks"),
        ({"stream": "two"}, "of stream two, expected ranks 2, 3 of 8 of stream one"),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_a_row_of_another_group_is_an_error(changes, expected, told) -> None:
    known: dict[str, Any] = {"ranks": (2, 3), "num_ranks": 8} if told else {}
    tables = iter([_row(0).to_table(), _row(1, **changes).to_table(), _row(2).to_table()])
    rows = SharedRows(tables, 2, node="n7", **known)
    assert rows.take(0)
    for reader in (0, 0):
        with pytest.raises(DamagedRowError, match=expected):
            rows.take(reader)
    assert rows.take(1)  # the row before it is intact
    with pytest.raises(DamagedRowError, match=expected):
        rows.take(1)


@pytest.mark.parametrize(
    "nodes", ["aaaaaaaa", "aaaabbbb", "abcdefgh", "aaaaaabc", "abababab", "abbbbcca"]
)
@pytest.mark.parametrize(("copies", "repeats"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 8)])
def test_every_node_gets_each_part_of_its_ranks_once(nodes, copies, repeats) -> None:
    num_ranks = 8 // copies // repeats
    data_ranks = [rank // copies % num_ranks for rank in range(8)]
    by_node = ranks_of_nodes(nodes, data_ranks)
    parts = [_part(rank) for rank in range(num_ranks)]
    rows = list(
        join_by_node(iter(parts), by_node.values(), lambda ranks: replace(ORIGIN, ranks=ranks))
    )
    assert [row.origin.ranks for row in rows] == list(by_node.values())
    by_name = dict(zip(by_node, rows, strict=True))
    for node, rank in zip(nodes, data_ranks, strict=True):
        assert by_name[node].part(rank).equals(parts[rank])
    assert list(by_node) == list(dict.fromkeys(nodes))


def test_a_rank_does_not_wait_for_one_that_reads_ahead() -> None:
    go_on = Event()

    def tables() -> Iterator[pa.Table]:
        yield from _tables(1)
        assert go_on.wait(60)
        yield _row(1).to_table()

    rows = SharedRows(tables(), 2)
    with ThreadPoolExecutor(1) as pool:
        assert rows.take(0)
        ahead = pool.submit(rows.take, 0)
        assert rows.take(1)
        assert not ahead.done()
        go_on.set()
        assert ahead.result().origin.first_step == 1


def test_rows_are_let_go_once_all_ranks_have_them() -> None:
    rows = SharedRows(_tables(9), 2)
    begin = pa.total_allocated_bytes()
    kept = []
    for _ in range(9):
        rows.take(0)
        rows.take(1)
        kept.append(pa.total_allocated_bytes() - begin)
    assert max(kept) <= 2 * kept[0]
    assert rows.take(0) is None
    assert rows.take(1) is None


def _received(parts: Iterator[pa.Buffer]) -> list[bytes]:
    return [part.to_pybytes() for part in parts]


def test_ranks_of_a_node_get_their_parts() -> None:
    groups, ranks = 50, (2, 3, 3)
    rows = SharedRows(_tables(groups), 1 + len(ranks), ranks=(2, 3), num_ranks=8)
    server = RowServer(rows, len(ranks), num_ranks=8, node="n")
    with ThreadPoolExecutor(3) as pool:
        # Another process of this machine, which does not know the key.
        stranger = server.address._replace(key=b"guess")
        with pytest.raises(FeederLostError):
            parts_from(stranger, 2, num_ranks=8, node="n")
        others = [
            pool.submit(_received, parts_from(server.address, rank, num_ranks=8, node="n"))
            for rank in ranks
        ]
        for group in range(groups):
            row = rows.take(0)
            assert row
            assert row.part(2).equals(_part(group, 2))
        assert rows.take(0) is None
        for rank, received in zip(ranks, others, strict=True):
            expected = [_part(group, rank).to_pybytes() for group in range(groups)]
            assert received.result() == expected
    server.close()


def test_ranks_that_disagree_on_their_number_are_an_error() -> None:
    rows = SharedRows(_tables(5), 2)
    server = RowServer(rows, 1, num_ranks=8, node="n7")
    with pytest.raises(FeederLostError):
        _received(parts_from(server.address, 3, num_ranks=4, node="n7"))
    expected = "node n7: rank 3 counts 4 data ranks, the rank that reads its rows counts 8"
    with pytest.raises(DamagedRowError, match=expected):
        [rows.take(0) for _ in range(6)]
    server.close()


def _serve_forever(pipe: Connection) -> None:
    def tables() -> Iterator[pa.Table]:
        yield from _tables(2)
        pipe.send("two rows are read")
        Event().wait()

    server = RowServer(SharedRows(tables(), 2), 1, num_ranks=8, node="n")
    pipe.send(server.address)
    Event().wait()


def test_the_death_of_the_rank_that_reads_is_told_at_once() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_forever, args=(there,))
    process.start()
    parts = parts_from(here.recv(), 3, num_ranks=8, node="n7")
    assert [next(parts).size for _ in range(2)] == [103, 103]
    assert here.recv() == "two rows are read"
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(FeederLostError) as lost:
        next(parts)
    assert str(lost.value) == "rank 3 of 8: the rank that reads the rows of node n7 is gone"
    process.join()
