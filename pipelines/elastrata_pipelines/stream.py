"""The stream: Ray Data reads and deals groups of steps and passes each Train worker its part in
order.

A task turns each descriptor of groups into one row per rank: it reads the stripes, forms and deals
the batches, and encodes all rows of a rank in the group as one binary payload. `streaming_split`
distributes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
import ray.train
from ray.data import DataIterator, Dataset, ExecutionOptions, ExecutionResources, TaskPoolStrategy

from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Start
from elastrata_pipelines.groups import Group, Groups
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import EQUAL, RankKinds, SpeedSource, equal_kinds, equal_speeds

# Zero, because workers may claim all CPUs and would then wait forever for readers that wait for a
# CPU. `CONCURRENT_READERS` bounds what readers actually take.
READER_CPUS = 0
"""Logical CPUs of a reading task."""
CONCURRENT_READERS = 2
MAX_DESCRIPTORS = 256
PREFETCHED_PAYLOADS = 2
READ_AHEAD_BYTES = 512 * 2**20
"""Limit on the object store memory that prefetched payloads of all ranks take."""


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
        nodes = worker_node_ids or [""] * world_size
        speeds, kinds = self._speeds(nodes), self._kinds(nodes)
        for name, dataset in datasets.items():
            splits = split_dealt_groups(
                dataset,
                self._phases,
                world_size,
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
    world_size: int,
    *,
    copies: int = 1,
    repeats: int = 1,
    speeds: SpeedSource = EQUAL,
    kinds: RankKinds = (),
) -> list[DataIterator]:
    """Split the groups of `dataset` into one iterator of payloads per rank.

    Args:
        dataset: data set of descriptors.
        phases: phases that the descriptors refer to.
        world_size: number of ranks.
        copies: number of neighbouring ranks that get the same payloads.
        repeats: number of times that the ranks which have all payloads between them are repeated.
        speeds: speeds of the data ranks.
        kinds: memory kinds of the data ranks; empty if they are all alike.

    Raises:
        ValueError: `copies` times `repeats` does not divide `world_size`.
    """
    shared = copies * repeats
    if world_size % shared:
        raise ValueError(f"{world_size} ranks in groups of {shared}")
    reader = Reader(tuple(phases), world_size // shared, copies, repeats, speeds, kinds)
    payloads = dataset.map_batches(
        reader,
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=READER_CPUS,
        compute=TaskPoolStrategy(size=CONCURRENT_READERS),
    )
    payloads.context.enable_progress_bars = False
    # One byte: every row becomes a block.
    payloads.context.target_max_block_size = 1
    payloads.context.execution_options = ExecutionOptions(
        # With ordered blocks of one row each and an equal split, block i goes to rank i mod W, so
        # rank r gets exactly its own payloads, in order, at any world size. Ray does not document
        # this, so every payload names its rank and training checks it (`payload.in_turn`).
        preserve_order=True,
        resource_limits=ExecutionResources(object_store_memory=READ_AHEAD_BYTES),
    )
    return payloads.streaming_split(world_size, equal=True)


@dataclass(frozen=True)
class Reader:
    """Reads and deals the groups of a descriptor into one row per rank, in rank order."""

    phases: tuple[Phase, ...]
    num_ranks: int
    """Number of ranks that have different rows."""
    copies: int = 1
    """Number of neighbouring ranks that get the same rows."""
    repeats: int = 1
    """Number of times that the sequence of ranks is repeated."""
    speeds: SpeedSource = EQUAL
    """Speeds of the ranks that have different rows."""
    kinds: RankKinds = ()
    """Memory kinds of the same ranks."""

    def __call__(self, descriptor: pa.Table) -> Iterator[pa.Table]:
        """Yield tables of one row that holds a payload."""
        for row in descriptor.to_pylist():
            phase = self.phases[row["phase"]]
            start = Start(**{key: row[key] for key in Start.__dataclass_fields__})
            groups = _groups(phase, start, row["max_steps"] or None)
            for payload in self._payloads(phase.batches, groups[row["first"] : row["end"]]):
                table = pa.table({"payload": _one_value(payload)})
                yield from [table] * self.copies

    def _payloads(self, batches: Batches, groups: list[Group]) -> Iterator[pa.Buffer]:
        stripes = batches.stripes()
        for group in groups:
            speeds = self.speeds(group.first_step)
            payloads = batches.payloads(
                group, self.num_ranks, stripes, speeds=speeds, kinds=self.kinds
            )
            yield from payloads if self.repeats == 1 else list(payloads) * self.repeats
        # No step is left. Ray Data cannot split an empty data set, so every rank gets an empty
        # payload.
        if not groups:
            yield from [pa.py_buffer(b"")] * self.num_ranks * self.repeats


def _one_value(payload: pa.Buffer) -> pa.LargeBinaryArray:
    """Return a column of one row that wraps `payload` without a copy."""
    offsets = pa.py_buffer(np.array([0, payload.size], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, payload])


class RankStream:
    """One rank's side of the stream.

    Args:
        iterator: this rank's split.
        token_dtype: token type from the manifest.
    """

    def __init__(self, iterator: DataIterator, token_dtype: str) -> None:
        self._tables = iter(
            iterator.iter_batches(
                batch_size=None,  # type: ignore[arg-type]
                batch_format="pyarrow",
                prefetch_batches=PREFETCHED_PAYLOADS,
            )
        )
        self._token_dtype = token_dtype
        self._first: pa.Table = next(self._tables)

    def __iter__(self) -> Iterator[RankStep]:
        table: pa.Table
        for table in chain([self._first], self._tables):
            payload = table["payload"].chunk(0)[0].as_buffer()
            if payload.size:
                yield from decode(payload, self._token_dtype)
