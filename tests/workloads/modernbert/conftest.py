"""A small vocabulary, rows of random tokens and a tiny ModernBERT with a window of eight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.modernbert import ModernBert

PAD, MASK, NUM_IDS = 0, 4, 97
SIZES = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_positions": 128, "window": 8}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(
        size=NUM_IDS, pad_id=PAD, mask_id=MASK, special_ids=(0, 1, 2, 3, 4), continuation_ids=()
    )


@pytest.fixture
def make_modernbert() -> Callable[..., ModernBert]:
    return lambda **changes: ModernBert(**{**SIZES, **changes})


@pytest.fixture
def make_rows() -> Callable[..., Rows]:
    """Samples of random tokens of the given lengths."""

    def make(lengths: Sequence[int], *, seed: int = 0) -> Rows:
        rng = np.random.default_rng(seed)
        samples = [rng.integers(5, NUM_IDS, length).astype(np.uint16) for length in lengths]
        return Rows(
            sample_ids=rng.integers(0, 2**63, len(lengths)).astype(np.uint64),
            epochs=np.zeros(len(lengths), dtype=np.int64),
            lengths=np.array(lengths, dtype=np.int64),
            tokens=np.concatenate([np.zeros(0, np.uint16), *samples]),
        )

    return make
