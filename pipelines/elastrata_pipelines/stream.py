"""The stream: Ray Data reads and deals groups of steps; every Train worker gets its part in order.

Descriptors of groups -> read the stripes, form and deal the batches, one row per rank with all its
rows of the group as one binary payload -> `streaming_split`. With `preserve_order`, blocks of one
row and equal splits, block i goes to rank i mod W: rank r gets exactly its payloads, in order, at
any world size. Ray promises that nowhere, so every payload says whose it is, and training looks
(`payload.in_turn`).
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
from elastrata_pipelines.speeds import EQUAL, RankKinds, SpeedSource, equal_speeds, one_kind

READER_CPUS = 0
"""Logical CPUs of a reading task. None, so that workers that claim all CPUs never wait for readers
that wait for a CPU; `CONCURRENT_READERS` bounds what they take."""
CONCURRENT_READERS = 2
MAX_DESCRIPTORS = 256
PREFETCHED_PAYLOADS = 2
READ_AHEAD_BYTES = 512 * 2**20
"""Most memory of Ray's object store that payloads read ahead may take, over all ranks."""


def descriptors(phases: Sequence[Phase], start: Start, *, max_steps: int | None = None) -> Dataset:
    """The data set of descriptors from `start` to the last step, in order.

    A descriptor names consecutive groups of a phase by their numbers, and is one block. Ray Data
    spends about a millisecond on each block before it starts, so a long run has many groups in each
    descriptor.

    Args:
        phases: of the run.
        start: where it is.
        max_steps: most steps of a group; None: as many as their tokens allow.
    """
    left = [len(_groups(phase, start, max_steps)) for phase in phases]
    share = max(1, -(-sum(left) // MAX_DESCRIPTORS))
    spans = [
        (number, first, min(first + share, count))
        for number, count in enumerate(left)
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
    """Deals the descriptors' groups to whatever world size the worker group has.

    Args:
        phases: of the run.
        copies: so many neighbouring ranks get the same rows.
        repeats: the ranks that have all rows between them come so many times over.
        speeds: by the nodes of a group's ranks, the speeds of its data ranks.
        kinds: likewise their kinds, by their memory.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        *,
        copies: int = 1,
        repeats: int = 1,
        speeds: Callable[[Sequence[str]], SpeedSource] = equal_speeds,
        kinds: Callable[[Sequence[str]], RankKinds] = one_kind,
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
        """One iterator per rank and data set name."""
        parts: list[dict[str, DataIterator]] = [{} for _ in range(world_size)]
        nodes = worker_node_ids or [""] * world_size
        speeds, kinds = self._speeds(nodes), self._kinds(nodes)
        for name, dataset in datasets.items():
            splits = dealt(
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


def dealt(
    dataset: Dataset,
    phases: Sequence[Phase],
    world_size: int,
    *,
    copies: int = 1,
    repeats: int = 1,
    speeds: SpeedSource = EQUAL,
    kinds: RankKinds = (),
) -> list[DataIterator]:
    """Splits the groups of `dataset` into one iterator of payloads per rank.

    Args:
        dataset: of descriptors.
        phases: that they are of.
        world_size: number of ranks.
        copies: so many neighbouring ranks get the same payloads.
        repeats: the ranks that have all payloads between them come so many times over.
        speeds: of the data ranks.
        kinds: of the data ranks, by their memory; none: they are of one kind.

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
    payloads.context.target_max_block_size = 1
    payloads.context.execution_options = ExecutionOptions(
        preserve_order=True,
        resource_limits=ExecutionResources(object_store_memory=READ_AHEAD_BYTES),
    )
    return payloads.streaming_split(world_size, equal=True)


@dataclass(frozen=True)
class Reader:
    """Reads and deals the groups of a descriptor: a row for every rank, in the order of ranks."""

    phases: tuple[Phase, ...]
    num_ranks: int
    """So many have different rows."""
    copies: int = 1
    """So many neighbours get the same."""
    repeats: int = 1
    """So many times over."""
    speeds: SpeedSource = EQUAL
    """Of the ranks that have different rows."""
    kinds: RankKinds = ()
    """Of the same ranks, by their memory."""

    def __call__(self, descriptor: pa.Table) -> Iterator[pa.Table]:
        """Tables of one row, a payload."""
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
        if not groups:  # no step is left: Ray Data splits no empty data set
            yield from [pa.py_buffer(b"")] * self.num_ranks * self.repeats


def _one_value(payload: pa.Buffer) -> pa.LargeBinaryArray:
    """A column of one row around `payload`, uncopied."""
    offsets = pa.py_buffer(np.array([0, payload.size], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, payload])


class RankStream:
    """One rank's side of the stream.

    Args:
        iterator: this rank's split.
        token_dtype: the manifest's.
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
