"""webdataset: tar shards, shuffled by shard and buffer, alone and with worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import itemgetter
from pathlib import Path

import webdataset

from data_loaders.samples import (
    BATCH_SIZE,
    SHUFFLE_BUFFER,
    WORKERS,
    Batch,
    Samples,
    collate_bytes,
)

SHARD_BYTES = 32 * 2**20


def write(samples: Samples, folder: Path) -> None:
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=SHARD_BYTES, verbose=0) as writer:
        for number in range(len(samples)):
            writer.write({"__key__": f"{number:09d}", "tokens": samples[number].tobytes()})


def alone(folder: Path) -> Iterator[Iterator[Batch]]:
    return map(iter, repeat(_data(folder)))


def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
    loader = webdataset.WebLoader(
        _data(folder),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=WORKERS,
        persistent_workers=True,
        prefetch_factor=16,
    )
    return map(iter, repeat(loader))


def _data(folder: Path) -> webdataset.WebDataset:
    shards = sorted(map(str, folder.glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(SHUFFLE_BUFFER)
    samples = data.map(itemgetter("tokens"))
    return samples.batched(BATCH_SIZE, collation_fn=collate_bytes, partial=True)


def _as_it_is(batch: Batch) -> Batch:
    return batch


VARIANTS = {"in process": alone, f"{WORKERS} workers": with_workers}
