"""grain: ArrayRecord files, shuffled globally, without and with reading threads and processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import grain
from array_record.python.array_record_module import ArrayRecordWriter

from data_loaders.samples import BATCH_SIZE, WORKERS, Batch, Samples, collate_bytes


def write(samples: Samples, folder: Path) -> None:
    folder.mkdir()
    writer = ArrayRecordWriter(str(folder / "samples.array_record"), "group_size:1,uncompressed")
    for number in range(len(samples)):
        writer.write(samples[number].tobytes())
    writer.close()


def without_threads(folder: Path) -> Iterator[Iterator[Batch]]:
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return (iter(_data(folder, seed).to_iter_dataset(options)) for seed in count())


def with_threads(folder: Path) -> Iterator[Iterator[Batch]]:
    return (iter(_data(folder, seed).to_iter_dataset()) for seed in count())


def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    workers = grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=16)
    return (
        iter(_data(folder, seed).to_iter_dataset(options).mp_prefetch(workers)) for seed in count()
    )


def _data(folder: Path, seed: int) -> grain.MapDataset:
    source = grain.sources.ArrayRecordDataSource(str(folder / "samples.array_record"))
    shuffled = grain.MapDataset.source(source).seed(seed).shuffle()
    return shuffled.batch(BATCH_SIZE, batch_fn=collate_bytes)


VARIANTS = {
    "in process": without_threads,
    "16 threads": with_threads,
    f"{WORKERS} workers": with_workers,
}
