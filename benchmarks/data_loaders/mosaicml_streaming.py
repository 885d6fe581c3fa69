"""MosaicML Streaming: MDS shards, shuffled, alone and with torch's worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from unittest.mock import patch

from data_loaders.samples import BATCH_SIZE, WORKERS, Batch, Samples, batched, collate_bytes

# Streaming imports torchvision, and that of PyPI fails at this call beside a CPU build of torch.
# Nothing of it is used here.
with patch("torch.library.register_fake", lambda *_, **__: lambda function: function):
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset


def write(samples: Samples, folder: Path) -> None:
    with MDSWriter(out=str(folder), columns={"tokens": "bytes"}) as writer:
        for number in range(len(samples)):
            writer.write({"tokens": samples[number].tobytes()})


def alone(folder: Path) -> Iterator[Iterator[Batch]]:
    return (batched(data, _collate) for data in repeat(_data(folder)))


def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
    loader = StreamingDataLoader(
        _data(folder),
        batch_size=BATCH_SIZE,
        num_workers=WORKERS,
        collate_fn=_collate,
        persistent_workers=True,
        prefetch_factor=16,
    )
    return map(iter, repeat(loader))


def _data(folder: Path) -> StreamingDataset:
    return StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH_SIZE)


def _collate(samples: list[dict[str, bytes]]) -> Batch:
    return collate_bytes([sample["tokens"] for sample in samples])


VARIANTS = {"in process": alone, f"{WORKERS} workers": with_workers}
