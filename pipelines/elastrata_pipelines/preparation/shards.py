"""Shards: samples in stored order, stratified by length, gathered from the runs.

A run is a file of records end to end, a record a sample's tokens and extras as raw bytes. The
sizes of all records stay with the driver, so that a shard's share of a run is read as one range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastrata_pipelines.format import FileEntry, write_shard
from elastrata_pipelines.hashing import U64, combine, key
from elastrata_pipelines.preparation.samples import Ints, Samples, stripe_table
from elastrata_pipelines.storage import Storage

_MAX_GAP_BYTES = 256 * 2**10


@dataclass(frozen=True, kw_only=True)
class Run:
    """The index of a run: 16 bytes a sample."""

    path: str
    ids: U64
    """Sorted by shuffle key, shape [n]."""
    lengths: Ints
    """Tokens of each sample, shape [n]."""
    sizes: Ints
    """Bytes of each record, shape [n]."""


def shuffle_keys(seed: int, ids: U64) -> U64:
    """The key of each sample by which the data set is shuffled."""
    return combine(key(seed), ids)


def write_run(storage: Storage, path: str, samples: Samples, seed: int) -> Run:
    """Writes samples as a run, sorted by shuffle key."""
    order = np.argsort(shuffle_keys(seed, samples.ids), kind="stable")
    ends = np.cumsum(samples.lengths)
    begins = ends - samples.lengths
    tokens = np.ascontiguousarray(samples.tokens).data.cast("B")
    width = samples.tokens.dtype.itemsize
    data = bytearray()
    for sample in order.tolist():
        data += tokens[int(begins[sample]) * width : int(ends[sample]) * width]
        if samples.extras is not None:
            data += samples.extras[sample]
    sizes = samples.lengths[order] * width
    if samples.extras is not None:
        sizes = sizes + np.array([len(samples.extras[sample]) for sample in order], dtype=np.int64)
    storage.write(data, path)
    return Run(path=path, ids=samples.ids[order], lengths=samples.lengths[order], sizes=sizes)


def read_records(
    storage: Storage, path: str, offsets: Ints, sizes: npt.NDArray[np.integer]
) -> list[bytes]:
    """Reads records of a run, given their places in rising order; near ones in one go."""
    records: list[bytes] = []
    for first, last in _spans(offsets, sizes):
        begin = int(offsets[first])
        end = int(offsets[last - 1] + sizes[last - 1])
        data = storage.fs.cat_file(storage.path(path), start=begin, end=end)
        for place in range(first, last):
            start = int(offsets[place]) - begin
            records.append(data[start : start + int(sizes[place])])
    return records


def _spans(offsets: Ints, sizes: npt.NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of records between which lies little enough to read it along."""
    gaps = offsets[1:] - (offsets[:-1] + sizes[:-1])
    cuts: Sequence[int] = [0, *(np.flatnonzero(gaps > _MAX_GAP_BYTES) + 1).tolist(), len(offsets)]
    for first, last in pairwise(cuts):
        if last > first:
            yield first, last


MAX_STRATA = 64


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The samples of one shard, and where they lie in the runs; arrays have one entry per
    sample."""

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


def strata(lengths: npt.ArrayLike) -> Ints:
    """The stratum of each sample, at most `MAX_STRATA` of them, shape [N].

    Samples of equal length share a stratum; strata hold about equal numbers of samples, as far as
    that allows.
    """
    counts = np.bincount(np.asarray(lengths, dtype=np.int64))
    shorter = np.cumsum(counts) - counts
    band = shorter * MAX_STRATA // max(1, int(counts.sum()))
    return np.asarray(band[np.asarray(lengths)], dtype=np.int64)


def stored_order(keys: U64, lengths: npt.ArrayLike, stripe_size: int) -> Ints:
    """The samples in stored order, as indices, shape [N]: stripe after stripe.

    A stripe of m of the N samples holds of a stratum with n samples n m / N, give or take less
    than 1 + K n / N, where K is the number of strata. Inside a stripe the longest sample comes
    first. Ties go by key, then by index.

    Args:
        keys: hash of (seed, sample id) of each sample, shape [N].
        lengths: tokens of each sample, shape [N].
        stripe_size: samples per stripe; the last one may be short.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    shuffled = np.argsort(keys, kind="stable")
    stratum = strata(lengths[shuffled])
    grouped = np.argsort(stratum, kind="stable")
    sizes = np.bincount(stratum)
    firsts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(lengths), dtype=np.float64)
    place = np.arange(len(lengths)) - np.repeat(firsts, sizes)
    ranks[grouped] = (place + 0.5) / np.repeat(sizes, sizes)
    order = shuffled[np.argsort(ranks, kind="stable")]
    for first in range(0, len(order), stripe_size):
        stripe = order[first : first + stripe_size]
        by_key = stripe[np.argsort(keys[stripe], kind="stable")]
        order[first : first + stripe_size] = by_key[np.argsort(-lengths[by_key], kind="stable")]
    return order
