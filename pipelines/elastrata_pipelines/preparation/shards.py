"""Shards: brings samples into stored order, stratified by length, and writes them.

A run is a file of concatenated records; a record contains a sample's tokens and extras as raw
bytes.
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

# A request takes longer than reading a gap of this size.
_MAX_GAP_BYTES = 256 * 2**10


@dataclass(frozen=True, kw_only=True)
class Run:
    """Index of a run, 16 bytes per sample."""

    path: str
    ids: U64
    """Sample ids sorted by shuffle key, shape [n]."""
    lengths: Ints
    """Tokens of each sample, shape [n]."""
    # The driver keeps the sizes of all records, so a shard's part of a run can be read as one
    # range.
    sizes: Ints
    """Bytes of each record, shape [n]."""


def shuffle_keys(seed: int, ids: U64) -> U64:
    """Return the key of each sample by which the data set is shuffled."""
    return combine(key(seed), ids)


def write_run(storage: Storage, path: str, samples: Samples, seed: int) -> Run:
    """Write samples as a run, sorted by shuffle key."""
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
    """Read records of a run at ascending offsets; records close together are read in one
    request."""
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
    """Yield half-open ranges of records with small gaps between them."""
    gaps = offsets[1:] - (offsets[:-1] + sizes[:-1])
    cuts: Sequence[int] = [0, *(np.flatnonzero(gaps > _MAX_GAP_BYTES) + 1).tolist(), len(offsets)]
    for first, last in pairwise(cuts):
        if last > first:
            yield first, last


MAX_STRATA = 64


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The samples of one shard, and their places in the runs; arrays have one entry per sample."""

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
    """Shards of a data set, and the lengths of all samples in stored order."""

    shards: list[Shard]
    lengths: npt.NDArray[np.int32]


def plan_shards(
    runs: Sequence[Run], *, seed: int, stripe_size: int, stripes_per_shard: int
) -> Plan:
    """Assign each sample of the runs to a place in a shard."""
    ids = np.concatenate([run.ids for run in runs])
    lengths = np.concatenate([run.lengths for run in runs]).astype(np.int32)
    sizes = np.concatenate([run.sizes for run in runs]).astype(np.int32)
    offsets = np.concatenate([np.cumsum(run.sizes) - run.sizes for run in runs])
    numbers = np.repeat(np.arange(len(runs), dtype=np.int32), [len(run.ids) for run in runs])
    order = compute_stored_order(shuffle_keys(seed, ids), lengths, stripe_size)
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
    """Task that collects the samples of one shard and writes it."""

    data_set: Storage
    runs: Storage
    token_bytes: int
    stripe_size: int
    packed: bool
    pairs: bool

    def __call__(self, shard: Shard) -> FileEntry:
        """Write `shard` and return its manifest entry."""
        return write_shard(self.data_set, shard.path, self._stripes(shard, self._records(shard)))

    def _records(self, shard: Shard) -> list[bytes]:
        """Return the record of each sample, in stored order."""
        records = [b""] * len(shard.ids)
        for run, path in enumerate(shard.run_paths):
            own_samples = np.flatnonzero(shard.runs == run)
            # `read_records` needs ascending offsets.
            own_samples = own_samples[np.argsort(shard.offsets[own_samples])]
            found = read_records(
                self.runs, path, shard.offsets[own_samples], shard.sizes[own_samples]
            )
            for place, record in zip(own_samples.tolist(), found, strict=True):
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


def assign_strata(lengths: npt.ArrayLike) -> Ints:
    """Return the stratum of each sample, shape [N], of at most `MAX_STRATA` strata.

    Samples of equal length share a stratum. Apart from that, strata have about equal sizes.
    """
    counts = np.bincount(np.asarray(lengths, dtype=np.int64))
    shorter = np.cumsum(counts) - counts
    band = shorter * MAX_STRATA // max(1, int(counts.sum()))
    return np.asarray(band[np.asarray(lengths)], dtype=np.int64)


def compute_stored_order(keys: U64, lengths: npt.ArrayLike, stripe_size: int) -> Ints:
    """Return the indices of the samples in stored order, stripe after stripe, shape [N].

    A stripe of m of the N samples contains n m / N samples of a stratum with n samples, with an
    error below 1 + K n / N, where K is the number of strata. Inside a stripe the longest sample
    comes first. Ties are resolved by key, then by index.

    Args:
        keys: hash of (seed, sample id) of each sample, shape [N].
        lengths: tokens of each sample, shape [N].
        stripe_size: samples per stripe; the last stripe may be short.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    shuffled = np.argsort(keys, kind="stable")
    stratum = assign_strata(lengths[shuffled])
    grouped = np.argsort(stratum, kind="stable")
    sizes = np.bincount(stratum)
    firsts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(lengths), dtype=np.float64)
    place = np.arange(len(lengths)) - np.repeat(firsts, sizes)
    # Spreads the samples of each stratum evenly over (0, 1): merging by rank mixes all strata in
    # proportion to their sizes.
    ranks[grouped] = (place + 0.5) / np.repeat(sizes, sizes)
    order = shuffled[np.argsort(ranks, kind="stable")]
    for first in range(0, len(order), stripe_size):
        stripe = order[first : first + stripe_size]
        by_key = stripe[np.argsort(keys[stripe], kind="stable")]
        order[first : first + stripe_size] = by_key[np.argsort(-lengths[by_key], kind="stable")]
    return order
