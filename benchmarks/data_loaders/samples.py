"""The corpus: uint16 tokens end to end and the samples' offsets; and batches of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
"""The tokens of the batch's samples end to end, and the samples' lengths. Nothing is padded."""
BATCH_SIZE = 32
WORKERS = 2
SHUFFLE_BUFFER = 8192
"""Samples shuffled together where a loader has a buffer: as many as in a window of Elastrata's."""

Sample = TypeVar("Sample")


class Samples:
    """The samples of a corpus by number, uncopied."""

    def __init__(self, folder: Path) -> None:
        self.offsets = np.load(folder / "offsets.npy")
        # A plain array over the map: slicing np.memmap itself is several times slower.
        self.tokens = np.asarray(np.memmap(folder / "tokens.bin", np.uint16, mode="r"))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]


def collate(samples: Sequence[np.ndarray]) -> Batch:
    """A batch of samples."""
    return np.concatenate(samples), np.fromiter(map(len, samples), np.int64, len(samples))


def collate_bytes(samples: Sequence[bytes]) -> Batch:
    """A batch of samples stored as raw bytes."""
    lengths = np.fromiter(map(len, samples), np.int64, len(samples)) // 2
    return np.frombuffer(b"".join(samples), np.uint16), lengths


def batched(
    samples: Iterable[Sample], collated: Callable[[Sequence[Sample]], Batch]
) -> Iterator[Batch]:
    """Batches of consecutive samples; the last one may be short."""
    iterator = chain(samples)  # ends once for all: litData's own starts anew when asked again
    while batch := list(islice(iterator, BATCH_SIZE)):
        yield collated(batch)
