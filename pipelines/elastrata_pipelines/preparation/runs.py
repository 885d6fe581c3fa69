"""Runs: tokenised portions on their way to the shards, each sorted by shuffle key.

A run is a file of records end to end, a record a sample's tokens and extras as raw bytes. The
sizes of all records stay with the driver, so that a shard's share of a run is read as one range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import U64, combine, key
from elastrata_pipelines.preparation.samples import Ints, Samples
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
