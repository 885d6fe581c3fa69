"""Plain NumPy: a memory map of all tokens, a permutation of the samples an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from data_loaders.samples import BATCH_SIZE, Batch, Samples


def epochs(folder: Path) -> Iterator[Iterator[Batch]]:
    samples = Samples(folder)
    return (_epoch(samples, seed) for seed in count())


def _epoch(samples: Samples, seed: int) -> Iterator[Batch]:
    order = np.random.default_rng(seed).permutation(len(samples))
    starts, ends, tokens = samples.offsets[order], samples.offsets[order + 1], samples.tokens
    cuts = [*range(0, len(order), BATCH_SIZE), len(order)]
    for begin, end in pairwise(cuts):
        first, last = starts[begin:end], ends[begin:end]
        parts = [tokens[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        yield np.concatenate(parts), last - first


VARIANTS = {"in process": epochs}
