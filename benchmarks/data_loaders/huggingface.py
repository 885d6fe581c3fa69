"""Hugging Face datasets, map style: shuffled by indices, read as Arrow, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from data_loaders.samples import BATCH_SIZE, WORKERS, Batch, Samples


def write(samples: Samples, folder: Path) -> None:
    column = pa.ListArray.from_arrays(samples.offsets.astype(np.int32), pa.array(samples.tokens))
    datasets.Dataset(pa.table({"tokens": column})).save_to_disk(str(folder))


def alone(folder: Path) -> Iterator[Iterator[Batch]]:
    return (_arrow_epoch(_data(folder, seed)) for seed in count())


def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
    return (iter(_loader(_data(folder, seed))) for seed in count())


def _data(folder: Path, seed: int) -> datasets.Dataset:
    return datasets.load_from_disk(str(folder)).shuffle(seed=seed)


def _arrow_epoch(data: datasets.Dataset) -> Iterator[Batch]:
    return map(_flat, data.with_format("arrow").iter(BATCH_SIZE))


def _loader(data: datasets.Dataset) -> DataLoader:
    batches = BatchSampler(SequentialSampler(data), BATCH_SIZE, drop_last=False)
    return DataLoader(
        data.with_format("arrow"),
        sampler=batches,
        batch_size=None,
        collate_fn=_flat,
        num_workers=WORKERS,
        prefetch_factor=16,
    )


def _flat(table: pa.Table) -> Batch:
    column = table["tokens"].combine_chunks()
    tokens = column.flatten().to_numpy()
    return tokens, np.diff(column.offsets.to_numpy())


VARIANTS = {"in process": alone, f"{WORKERS} workers": with_workers}
