"""Rows of the stream: one holds what all ranks of a node get from a group of steps.

The first rank of a node reads the node's rows from Ray Data, and hands their parts to the other
ranks of its node over a Unix socket.
"""

# Ray Data's coordinator looks every 10 ms, for each consumer that waits, whether there is a block.
# With one consumer per rank this took all of its time from 512 ranks on; hence one per node. The
# ranks of a node share it within the process of the first one: an actor in between would be one
# more process to start in every group of workers, and a third copy of every payload.
from __future__ import annotations

import json
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from threading import Lock, Thread
from typing import NamedTuple

import numpy as np
import pyarrow as pa

_ALIGNMENT = 64
"""Every part begins at a multiple of so many bytes, as Arrow recommends."""
_SECONDS_TO_END = 1.0
"""Time for the other ranks to be told that the stream is over."""


class DamagedRowError(Exception):
    """A row of the stream is not what this node expects; the group of workers starts anew."""


class FeederLostError(Exception):
    """The rank that reads the rows of this node is gone, or has left the group."""


class Address(NamedTuple):
    """Where the first rank of a node hands out parts."""

    path: str
    key: bytes
    """Secret that the other ranks prove to know."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What the rows of one stream have in common, and the group of steps of one of them."""

    stream: str
    """Identifier of the stream; a new group of workers has a new stream."""
    num_ranks: int
    """Number of data ranks."""
    ranks: tuple[int, ...]
    """Data ranks of the node, ascending."""
    first_step: int
    """Number of steps of the run before the group."""
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """The parts of a node's ranks in a group of steps."""

    origin: Origin
    ends: tuple[int, ...]
    """End of each part in the payload, in bytes, without padding."""
    payload: pa.Buffer

    @classmethod
    def joined(cls, origin: Origin, parts: Sequence[pa.Buffer]) -> NodeRow:
        """Join the parts of `origin.ranks`; a single part is not copied."""
        if len(parts) == 1:
            return cls(origin=origin, ends=(parts[0].size,), payload=parts[0])
        begins = np.cumsum([0, *(_padded(part.size) for part in parts)])
        joined = np.zeros(int(begins[-1]), np.uint8)
        ends = [int(begin) + part.size for begin, part in zip(begins, parts, strict=False)]
        for begin, end, part in zip(begins, ends, parts, strict=False):
            joined[begin:end] = np.frombuffer(part, np.uint8)
        return cls(origin=origin, ends=tuple(ends), payload=pa.py_buffer(joined))

    @classmethod
    def from_table(cls, table: pa.Table, node: str) -> NodeRow:
        """Return the row that a table of `to_table` holds, as views of its memory.

        Raises:
            DamagedRowError: the payload is shorter or longer than its parts.
        """
        header = json.loads(table["header"][0].as_py())
        payload = table["payload"].chunk(0)[0].as_buffer()
        origin = Origin(**{**header["origin"], "ranks": tuple(header["origin"]["ranks"])})
        row = cls(origin=origin, ends=tuple(header["ends"]), payload=payload)
        if payload.size not in (row.ends[-1], _padded(row.ends[-1])):
            raise DamagedRowError(
                f"node {node}, {_describe(origin)}: its payload has {payload.size} bytes, its "
                f"parts have {row.ends[-1]}"
            )
        return row

    def to_table(self) -> pa.Table:
        """Return a table of one row, which holds the payload without a copy."""
        header = json.dumps({"origin": asdict(self.origin), "ends": self.ends})
        offsets = pa.py_buffer(np.array([0, self.payload.size], np.int64))
        payload = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), 1, [None, offsets, self.payload]
        )
        return pa.table({"header": [header], "payload": payload})

    def part(self, rank: int) -> pa.Buffer:
        """Return the part of a data rank, a view of the payload."""
        number = self.origin.ranks.index(rank)
        begin = _padded(self.ends[number - 1]) if number else 0
        return self.payload.slice(begin, self.ends[number] - begin)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _describe(origin: Origin) -> str:
    return (
        f"steps {origin.first_step + 1} to {origin.first_step + origin.num_steps} of ranks "
        f"{', '.join(map(str, origin.ranks))} of {origin.num_ranks}"
    )


def ranks_of_nodes(nodes: Sequence[str], data_ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the data ranks of each node, ascending; nodes in the order of their first ranks.

    Args:
        nodes: node of every rank.
        data_ranks: data rank of every rank.
    """
    ranks: dict[str, set[int]] = {}
    for node, rank in zip(nodes, data_ranks, strict=True):
        ranks.setdefault(node, set()).add(rank)
    return {node: tuple(sorted(of_node)) for node, of_node in ranks.items()}


def join_by_node(
    parts: Iterable[pa.Buffer], nodes: Iterable[Sequence[int]], origin: Callable[..., Origin]
) -> Iterator[NodeRow]:
    """Yield a row for each node.

    Args:
        parts: part of every data rank, in order; a part is let go with its last use.
        nodes: data ranks of each node, each ascending.
        origin: returns a row's origin for its `ranks`.
    """
    nodes = list(nodes)
    uses = Counter(rank for ranks in nodes for rank in ranks)
    numbered, held = enumerate(parts), dict[int, pa.Buffer]()
    for ranks in nodes:
        while not held.keys() >= set(ranks):
            number, part = next(numbered)
            held[number] = part
        yield NodeRow.joined(origin(ranks=tuple(ranks)), [held[rank] for rank in ranks])
        uses.subtract(ranks)
        held = {rank: part for rank, part in held.items() if uses[rank]}


class SharedRows:
    """The rows of a node, which each of several readers gets in order.

    Args:
        tables: tables of `NodeRow.to_table`.
        readers: number of readers. A row is kept until all of them have taken it.
        node: name of the node, for errors.
        ranks: data ranks of the node; None to take those of the first row.
        num_ranks: number of data ranks; None to take that of the first row.
    """

    def __init__(
        self,
        tables: Iterator[pa.Table],
        readers: int = 1,
        *,
        node: str = "",
        ranks: Sequence[int] | None = None,
        num_ranks: int | None = None,
    ) -> None:
        self._tables, self._node = tables, node
        self._ranks = None if ranks is None else tuple(ranks)
        self._num_ranks, self._stream = num_ranks, ""
        self._rows: dict[int, NodeRow | Exception | None] = {}
        self._next, self._taken = 0, [0] * readers
        self._reading, self._counting = Lock(), Lock()

    def take(self, reader: int) -> NodeRow | None:
        """Return the reader's next row; None after the last one.

        Raises:
            DamagedRowError: the row is of another stream, other ranks, or cut short.
            RayError: Ray Data could not produce it.
        """
        number = self._taken[reader]
        # A reader whose row is there does not wait for one that reads ahead.
        if number not in self._rows:
            with self._reading:
                if number not in self._rows:
                    self._rows[number] = self._read()
        row = self._rows[number]
        if row is None or isinstance(row, Exception):  # kept: all readers come to the same end
            if row is not None:
                raise row
            return None
        self._taken[reader] += 1
        self._let_go()
        return row

    def leave(self, reader: int) -> None:
        """Keep no more rows for this reader."""
        self._taken[reader] = 2**62
        self._let_go()

    def fail(self, error: Exception) -> None:
        """Raise this error in all readers, in the place of the next row."""
        with self._reading:
            self._rows[self._next] = error

    def _read(self) -> NodeRow | Exception | None:
        try:
            table = next(self._tables, None)
            row = None if table is None else NodeRow.from_table(table, self._node)
            if row is not None:
                self._check(row.origin)
                self._next += 1
            return row
        except Exception as error:
            return error

    def _check(self, origin: Origin) -> None:
        self._stream = self._stream or origin.stream
        self._ranks = self._ranks or origin.ranks
        self._num_ranks = self._num_ranks or origin.num_ranks
        expected = self._stream, self._ranks, self._num_ranks
        if (origin.stream, origin.ranks, origin.num_ranks) != expected:
            raise DamagedRowError(
                f"node {self._node}: got {_describe(origin)} of stream {origin.stream}, expected "
                f"ranks {', '.join(map(str, self._ranks))} of {self._num_ranks} of stream "
                f"{self._stream}"
            )

    def _let_go(self) -> None:
        with self._counting:
            slowest = min(self._taken)
            for number in list(self._rows):  # a copy in one step: another reader may add a row
                if number < slowest and isinstance(self._rows[number], NodeRow):
                    del self._rows[number]


class RowServer:
    """Hands the parts of a node's rows to the other ranks of the node.

    Args:
        rows: the node's rows, with a reader for this rank and each of the others.
        others: number of the other ranks.
        num_ranks: number of data ranks.
        node: name of the node, for errors.
    """

    def __init__(self, rows: SharedRows, others: int, *, num_ranks: int, node: str) -> None:
        self._rows, self._num_ranks, self._node = rows, num_ranks, node
        key = secrets.token_bytes(16)
        # Linux has sockets without a file, which a killed process does not leave behind.
        path = f"\0elastrata-{secrets.token_hex(8)}" if sys.platform == "linux" else None
        self._listener = Listener(path, "AF_UNIX", backlog=others, authkey=key)
        self.address = Address(path or str(self._listener.address), key)
        self._is_closed = False
        self._connections: list[Connection] = []
        self._threads: list[Thread] = []
        self._start(self._accept, others)

    def close(self, *, waits: bool = True) -> None:
        """Close all connections; ranks that have not had their last row get an error.

        Args:
            waits: wait a second for the others to be told that the stream is over.
        """
        for thread in self._threads[1:] if waits else ():
            thread.join(_SECONDS_TO_END / len(self._threads))
        self._is_closed = True
        # Closing the socket does not wake a thread that waits for connections.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as waking:
            waking.settimeout(_SECONDS_TO_END)
            waking.connect(self.address.path)
        with suppress(OSError):
            self._listener.close()
        for connection in self._connections:
            with suppress(OSError):  # its thread may have closed it just now
                connection.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        # Daemons: one that waits for Ray Data does not keep the process alive.
        thread = Thread(target=work, args=arguments, daemon=True, name="elastrata rows")
        self._threads.append(thread)
        thread.start()

    def _accept(self, others: int) -> None:
        reader = 0
        while reader < others and not self._is_closed:
            try:
                connection = self._listener.accept()
                reader += 1
                self._connections.append(connection)
                self._start(self._send, connection, reader)
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # not a rank of this group
            except OSError:
                return  # closed

    def _send(self, connection: Connection, reader: int) -> None:
        with suppress(OSError, EOFError):  # the rank has left, or this one has
            rank, num_ranks = connection.recv()
            if num_ranks != self._num_ranks:
                self._rows.fail(
                    DamagedRowError(
                        f"node {self._node}: rank {rank} counts {num_ranks} data ranks, the rank "
                        f"that reads its rows counts {self._num_ranks}"
                    )
                )
            try:
                while (row := self._rows.take(reader)) is not None:
                    connection.send_bytes(row.part(rank))
                connection.send_bytes(b"")
            except Exception:  # raised in this rank, too, which reads the same rows
                connection.close()
        self._rows.leave(reader)


def parts_from(address: Address, rank: int, *, num_ranks: int, node: str) -> Iterator[pa.Buffer]:
    """Connect to the server of this node, and return this rank's parts, in order.

    Args:
        address: of the server.
        rank: this data rank.
        num_ranks: number of data ranks.
        node: name of the node, for errors.

    Raises:
        FeederLostError: the rank that reads the rows is gone. Raised by the iterator, too.
    """
    lost = f"rank {rank} of {num_ranks}: the rank that reads the rows of node {node} is gone"
    try:
        connection = Client(address.path, family="AF_UNIX", authkey=address.key)
        connection.send((rank, num_ranks))
    except (OSError, EOFError, AuthenticationError) as error:
        raise FeederLostError(lost) from error
    return _received(connection, lost)


def _received(connection: Connection, lost: str) -> Iterator[pa.Buffer]:
    with connection:
        while True:
            try:
                part = connection.recv_bytes()
            except (OSError, EOFError) as error:
                raise FeederLostError(lost) from error
            if not part:
                return
            yield pa.py_buffer(part)
