"""Shards: samples gathered from the runs in stored order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastrata_pipelines.format import FileEntry, write_shard
from elastrata_pipelines.hashing import U64
from elastrata_pipelines.preparation.runs import Run, read_records, shuffle_keys
from elastrata_pipelines.preparation.samples import Ints, stripe_table
from elastrata_pipelines.preparation.stratify import stored_order
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one shard holds and where it lies in the runs; arrays have one entry per sample."""

    path: str
    run_paths: tuple[str, ...]
    ids: U64
    lengths: npt.NDArray[np.int32]
    runs: npt.NDArray[np.int32]
    """Index into `run_paths`."""
    offsets: Ints
    """First byte of the sample's record in its run."""
    sizes: npt.NDArray[np.int32]
    """Bytes of the record."""


@dataclass(frozen=True)
class Plan:
    """A data set's shards, and the lengths of all samples in stored order."""

    shards: list[Shard]
    lengths: npt.NDArray[np.int32]


def plan_shards(
    runs: Sequence[Run], *, seed: int, stripe_size: int, stripes_per_shard: int
) -> Plan:
    """Decides where each sample of the runs is stored."""
    ids = np.concatenate([run.ids for run in runs])
    lengths = np.concatenate([run.lengths for run in runs]).astype(np.int32)
    sizes = np.concatenate([run.sizes for run in runs]).astype(np.int32)
    offsets = np.concatenate([np.cumsum(run.sizes) - run.sizes for run in runs])
    numbers = np.repeat(np.arange(len(runs), dtype=np.int32), [len(run.ids) for run in runs])
    order = stored_order(shuffle_keys(seed, ids), lengths, stripe_size)
    shards = []
    size = stripe_size * stripes_per_shard
    for number, first in enumerate(range(0, len(order), size)):
        chosen = order[first : first + size]
        present, local = np.unique(numbers[chosen], return_inverse=True)
        shards.append(
            Shard(
                path=f"shards/{number:05d}.parquet",
                run_paths=tuple(runs[run].path for run in present),
                ids=ids[chosen],
                lengths=lengths[chosen],
                runs=local.astype(np.int32),
                offsets=offsets[chosen],
                sizes=sizes[chosen],
            )
        )
    return Plan(shards, lengths[order])


@dataclass(frozen=True)
class WriteShard:
    """Gathers and writes one shard."""

    data_set: Storage
    runs: Storage
    token_bytes: int
    stripe_size: int
    packed: bool
    pairs: bool

    def __call__(self, shard: Shard) -> FileEntry:
        """Writes `shard` and returns its manifest entry."""
        return write_shard(self.data_set, shard.path, self._stripes(shard, self._records(shard)))

    def _records(self, shard: Shard) -> list[bytes]:
        """The record of each sample, in stored order."""
        records = [b""] * len(shard.ids)
        for run, path in enumerate(shard.run_paths):
            mine = np.flatnonzero(shard.runs == run)
            mine = mine[np.argsort(shard.offsets[mine])]
            found = read_records(self.runs, path, shard.offsets[mine], shard.sizes[mine])
            for place, record in zip(mine.tolist(), found, strict=True):
                records[place] = record
        return records

    def _stripes(self, shard: Shard, records: list[bytes]) -> Iterator[pa.Table]:
        for first in range(0, len(records), self.stripe_size):
            part = slice(first, first + self.stripe_size)
            ends = (shard.lengths[part] * self.token_bytes).tolist()
            yield stripe_table(
                shard.ids[part],
                shard.lengths[part],
                [record[:end] for record, end in zip(records[part], ends, strict=True)],
                [record[end:] for record, end in zip(records[part], ends, strict=True)],
                packed=self.packed,
                pairs=self.pairs,
            )
