"""The stream: Ray Data reads and deals groups of steps and passes each node its ranks' parts in
order.

A task turns each descriptor of groups into one row per node: it reads the stripes, forms and deals
the batches, encodes all samples of a rank in the group as one payload, and joins the payloads of a
node's ranks (`node_rows.py`). `streaming_split` distributes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any
from uuid import uuid4

import pyarrow as pa
import ray.data
import ray.train
from ray.data import DataIterator, Dataset, ExecutionOptions, ExecutionResources, TaskPoolStrategy

from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Start
from elastrata_pipelines.groups import Group, Groups
from elastrata_pipelines.node_rows import (
    Address,
    NodeRow,
    Origin,
    RowServer,
    SharedRows,
    join_by_node,
    parts_from,
    ranks_of_nodes,
)
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import EQUAL, RankKinds, SpeedSource, equal_kinds, equal_speeds

# Zero, because workers may claim all CPUs and would then wait forever for readers that wait for a
# CPU. `CONCURRENT_READERS` bounds what readers actually take.
READER_CPUS = 0
"""Logical CPUs of a reading task."""
CONCURRENT_READERS = 2
MAX_DESCRIPTORS = 256
PREFETCHED_ROWS = 2
TOKENS_PER_RANK = 2**19
"""Tokens that a group should have for a rank, 1 MB with two bytes each: less is handed over too
often."""
NODES_PER_MAX_GROUP = 16
"""A group may have `MAX_GROUP_TOKENS`, and as many more for each of so many nodes, up to
`MOST_GROUP_TOKENS`."""
MOST_GROUP_TOKENS = 64 * 2**20
"""Maximum number of tokens of a group on any cluster, unless one step has more: a reader holds them
about three times, in 0.4 GB."""
READ_AHEAD_BYTES = 512 * 2**20
"""Limit on the object store memory that prefetched rows of all nodes take, at least."""


def descriptors(phases: Sequence[Phase], start: Start, *, max_steps: int | None = None) -> Dataset:
    """Return the data set of descriptors from `start` to the last step, in order.

    A descriptor is one block, and names consecutive groups of a phase by their numbers.

    Args:
        phases: phases of the run.
        start: progress of the run.
        max_steps: maximum number of steps in a group; None to let the token limit decide.
    """
    groups_left = [len(_groups(phase, start, max_steps)) for phase in phases]
    # Ray Data spends about a millisecond on each block before it starts, so the descriptors of a
    # long run hold many groups each.
    share = max(1, -(-sum(groups_left) // MAX_DESCRIPTORS))
    spans = [
        (number, first, min(first + share, count))
        for number, count in enumerate(groups_left)
        for first in range(0, count, share)
    ]
    rows = [
        {"phase": number, "first": first, "end": end, **asdict(start), "max_steps": max_steps or 0}
        for number, first, end in spans or [(0, 0, 0)]
    ]
    return ray.data.from_items(rows, override_num_blocks=len(rows))


def _groups(phase: Phase, start: Start, max_steps: int | None) -> Groups:
    return phase.groups(start, max_tokens=MAX_GROUP_TOKENS, max_steps=max_steps)


def most_tokens(num_ranks: int, num_nodes: int) -> int:
    """Return the largest number of tokens of a group for so many data ranks and nodes.

    At least `MAX_GROUP_TOKENS`, and about `TOKENS_PER_RANK` for each rank as long as the number of
    nodes allows it.
    """
    limit = MAX_GROUP_TOKENS + MAX_GROUP_TOKENS * num_nodes // NODES_PER_MAX_GROUP
    return max(MAX_GROUP_TOKENS, min(TOKENS_PER_RANK * num_ranks, limit, MOST_GROUP_TOKENS))


def join_groups(groups: Iterable[Group], most_steps: int, begin: int) -> Iterator[Group]:
    """Yield the same steps in fewer groups, of at most `most_steps` steps and one batch size.

    Args:
        groups: consecutive groups.
        most_steps: largest number of steps of a joined group.
        begin: number of steps of the run before the stream. A group has at most as many steps as
            come before it in the stream, so that the first steps arrive soon.
    """
    joined: Group | None = None
    for group in groups:
        if joined is None:
            joined = group
            continue
        steps = joined.num_steps + group.num_steps
        most = min(most_steps, joined.first_step - begin)
        if group.batch_size == joined.batch_size and steps <= most:
            joined = replace(joined, num_steps=steps)
        else:
            yield joined
            joined = group
    if joined is not None:
        yield joined


class StreamConfig(ray.train.DataConfig):
    """Deals the descriptors' groups to the ranks of a worker group of any size.

    Args:
        phases: phases of the run.
        copies: number of neighbouring ranks that get the same rows.
        repeats: number of times that the ranks which have all rows between them are repeated.
        speeds: function from the nodes of a group's ranks to the speeds of its data ranks.
        kinds: function from the same nodes to the memory kinds of the data ranks.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        *,
        copies: int = 1,
        repeats: int = 1,
        speeds: Callable[[Sequence[str]], SpeedSource] = equal_speeds,
        kinds: Callable[[Sequence[str]], RankKinds] = equal_kinds,
    ) -> None:
        super().__init__()
        self._speeds, self._kinds = speeds, kinds
        self._phases = phases
        self._copies = copies
        self._repeats = repeats

    def configure(
        self,
        datasets: dict[str, Dataset],
        world_size: int,
        worker_handles: Any = None,
        worker_node_ids: Any = None,
        **kwargs: Any,
    ) -> list[dict[str, DataIterator]]:
        """Return one iterator per rank and data set name."""
        parts: list[dict[str, DataIterator]] = [{} for _ in range(world_size)]
        nodes = worker_node_ids or [str(rank) for rank in range(world_size)]
        speeds, kinds = self._speeds(nodes), self._kinds(nodes)
        for name, dataset in datasets.items():
            splits = split_dealt_groups(
                dataset,
                self._phases,
                nodes,
                copies=self._copies,
                repeats=self._repeats,
                speeds=speeds,
                kinds=kinds,
            )
            for rank, split in enumerate(splits):
                parts[rank][name] = split
        return parts


def split_dealt_groups(
    dataset: Dataset,
    phases: Sequence[Phase],
    nodes: int | Sequence[str],
    *,
    copies: int = 1,
    repeats: int = 1,
    speeds: SpeedSource = EQUAL,
    kinds: RankKinds = (),
) -> list[DataIterator]:
    """Split the groups of `dataset` into one iterator of rows per node.

    Args:
        dataset: data set of descriptors.
        phases: phases that the descriptors refer to.
        nodes: node of every rank; or the number of ranks, each with a node of its own.
        copies: number of neighbouring ranks that get the same payloads.
        repeats: number of times that the ranks which have all payloads between them are repeated.
        speeds: speeds of the data ranks.
        kinds: memory kinds of the data ranks; empty if they are all alike.

    Returns:
        For every rank, the iterator of its node. Only one rank of a node may use it.

    Raises:
        ValueError: `copies` times `repeats` does not divide the number of ranks.
    """
    nodes = [str(rank) for rank in range(nodes)] if isinstance(nodes, int) else nodes
    shared = copies * repeats
    if len(nodes) % shared:
        raise ValueError(f"{len(nodes)} ranks in groups of {shared}")
    num_ranks = len(nodes) // shared
    data_ranks = [rank // copies % num_ranks for rank in range(len(nodes))]
    by_node = ranks_of_nodes(nodes, data_ranks)
    reader = Reader(
        tuple(phases), num_ranks, tuple(by_node.values()), speeds, kinds, stream=uuid4().hex
    )
    rows = dataset.map_batches(
        reader,
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=READER_CPUS,
        compute=TaskPoolStrategy(size=CONCURRENT_READERS),
    )
    rows.context.enable_progress_bars = False
    # One byte: every row becomes a block.
    rows.context.target_max_block_size = 1
    # Two groups ahead on the nodes, two that are being handed over and two that are being read.
    read_ahead = 6 * 2 * most_tokens(num_ranks, len(by_node))
    rows.context.execution_options = ExecutionOptions(
        # With ordered blocks of one row each and an equal split, block i goes to node i mod N, so
        # every node gets exactly its own rows, in order, whatever nodes there are. Ray does not
        # document this, so every row and every payload names its ranks, and nodes and training
        # check it (`SharedRows`, `payload.check_order`).
        preserve_order=True,
        resource_limits=ExecutionResources(object_store_memory=max(READ_AHEAD_BYTES, read_ahead)),
    )
    splits = rows.streaming_split(len(by_node), equal=True)
    numbers = {node: number for number, node in enumerate(by_node)}
    return [splits[numbers[node]] for node in nodes]


@dataclass(frozen=True)
class Reader:
    """Reads and deals the groups of a descriptor into one row per node."""

    phases: tuple[Phase, ...]
    num_ranks: int
    """Number of ranks that have different samples."""
    nodes: tuple[tuple[int, ...], ...]
    """These ranks on each node, in the order of the splits."""
    speeds: SpeedSource = EQUAL
    """Speeds of the ranks that have different samples."""
    kinds: RankKinds = ()
    """Memory kinds of the same ranks."""
    stream: str = ""
    """Identifier of the stream."""

    def __call__(self, descriptor: pa.Table) -> Iterator[pa.Table]:
        """Yield tables of one row."""
        for row in descriptor.to_pylist():
            phase = self.phases[row["phase"]]
            start = Start(**{key: row[key] for key in Start.__dataclass_fields__})
            groups: Iterable[Group] = _groups(phase, start, row["max_steps"] or None)[
                row["first"] : row["end"]
            ]
            if not row["max_steps"]:
                groups = join_groups(groups, self._most_steps(phase), start.step)
            for node_row in self._rows(phase.batches, groups):
                yield node_row.to_table()

    def _most_steps(self, phase: Phase) -> int:
        tokens_per_step = max(1, int(phase.batch_size * phase.batches.tokens_per_sample))
        return most_tokens(self.num_ranks, len(self.nodes)) // tokens_per_step

    def _rows(self, batches: Batches, groups: Iterable[Group]) -> Iterator[NodeRow]:
        stripes, is_empty = batches.stripes(), True
        for group in groups:
            is_empty = False
            parts = batches.payloads(
                group,
                self.num_ranks,
                stripes,
                speeds=self.speeds(group.first_step),
                kinds=self.kinds,
            )
            yield from join_by_node(
                parts, self.nodes, self._origin(group.first_step, group.num_steps)
            )
        # No step is left. Ray Data cannot split an empty data set, so every rank gets an empty
        # payload.
        if is_empty:
            empty = [pa.py_buffer(b"")] * self.num_ranks
            yield from join_by_node(empty, self.nodes, self._origin(0, 0))

    def _origin(self, first_step: int, num_steps: int) -> Callable[..., Origin]:
        return partial(
            Origin,
            stream=self.stream,
            num_ranks=self.num_ranks,
            first_step=first_step,
            num_steps=num_steps,
        )


def tables_of(iterator: DataIterator) -> Iterator[pa.Table]:
    """Yield the tables of a node's rows, two of them fetched ahead."""
    # A generator: nothing begins before the first row is wanted.
    yield from iterator.iter_batches(
        batch_size=None,  # type: ignore[arg-type]
        batch_format="pyarrow",
        prefetch_batches=PREFETCHED_ROWS,
    )


def parts_of(rows: SharedRows, rank: int | None = None, reader: int = 0) -> Iterator[pa.Buffer]:
    """Yield the parts of a data rank of this node; of its first one by default."""
    while (row := rows.take(reader)) is not None:
        yield row.part(row.origin.ranks[0] if rank is None else rank)


def open_parts(
    iterator: DataIterator,
    *,
    nodes: Sequence[str],
    data_ranks: Sequence[int],
    rank: int,
    gather: Callable[[Address | None], Sequence[Address | None]],
    closing: ExitStack,
) -> Callable[[], Iterator[pa.Buffer]]:
    """Return a function that returns this rank's parts. Collective if ranks share a node.

    The first rank of each node reads the node's rows, and serves the others.

    Args:
        iterator: this rank's iterator from `StreamConfig`.
        nodes: node of every rank.
        data_ranks: data rank of every rank.
        rank: this rank.
        gather: returns every rank's value, by rank.
        closing: receives what to close once this rank has left its group.
    """
    node, num_ranks = nodes[rank], max(data_ranks) + 1
    if len(set(nodes)) == len(nodes):
        return lambda: parts_of(SharedRows(tables_of(iterator), node=node))
    local_ranks = [other for other, its_node in enumerate(nodes) if its_node == node]
    address = None
    if rank == local_ranks[0]:
        ranks = ranks_of_nodes(nodes, data_ranks)[node]
        rows = SharedRows(
            tables_of(iterator), len(local_ranks), node=node, ranks=ranks, num_ranks=num_ranks
        )
        server = RowServer(rows, len(local_ranks) - 1, num_ranks=num_ranks, node=node)
        closing.push(lambda kind, *_: server.close(waits=kind is None))
        address = server.address
    first = gather(address)[local_ranks[0]]
    if address is not None:
        return lambda: parts_of(rows, data_ranks[rank])
    assert first is not None, f"rank {local_ranks[0]} is the first one of node {node}"
    return lambda: parts_from(first, data_ranks[rank], num_ranks=num_ranks, node=node)


class RankStream:
    """One rank's side of the stream. It waits for the first part.

    Args:
        parts: this rank's parts, or the iterator of its node if no other rank is on it.
        token_dtype: token type from the manifest.
    """

    def __init__(self, parts: DataIterator | Iterator[pa.Buffer], token_dtype: str) -> None:
        if isinstance(parts, DataIterator):
            parts = parts_of(SharedRows(tables_of(parts)))
        self._parts = parts
        self._token_dtype = token_dtype
        self._first = next(self._parts, pa.py_buffer(b""))

    def __iter__(self) -> Iterator[RankStep]:
        for part in chain([self._first], self._parts):
            if part.size:
                yield from decode(part, self._token_dtype)
