"""litData: optimized chunks, shuffled, alone and with torch's worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
from litdata import StreamingDataLoader, StreamingDataset, optimize

from data_loaders.samples import BATCH_SIZE, WORKERS, Batch, Samples, batched, collate


class _Reader:
    """What `optimize` calls for each sample, in its own process."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __call__(self, number: int) -> np.ndarray:
        return self._samples[number].copy()


def write(samples: Samples, folder: Path) -> None:
    optimize(
        _Reader(samples),
        inputs=list(range(len(samples))),
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def alone(folder: Path) -> Iterator[Iterator[Batch]]:
    return (batched(data, collate) for data in repeat(_data(folder)))


def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
    loader = StreamingDataLoader(
        _data(folder),
        batch_size=BATCH_SIZE,
        num_workers=WORKERS,
        collate_fn=collate,
        persistent_workers=True,
        prefetch_factor=16,
    )
    return map(iter, repeat(loader))


def _data(folder: Path) -> StreamingDataset:
    return StreamingDataset(str(folder), shuffle=True, drop_last=False)


VARIANTS = {"in process": alone, f"{WORKERS} workers": with_workers}
