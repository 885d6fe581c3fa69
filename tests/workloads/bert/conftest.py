"""A small vocabulary, rows of random tokens and a tiny BERT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import Bert

PAD, UNK, CLS, SEP, MASK = range(5)
NUM_IDS = 97
FIRST_CONTINUATION = 60


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(
        size=NUM_IDS,
        pad_id=PAD,
        mask_id=MASK,
        special_ids=(PAD, UNK, CLS, SEP, MASK),
        continuation_ids=tuple(range(FIRST_CONTINUATION, NUM_IDS)),
    )


@pytest.fixture
def make_bert() -> Callable[..., Bert]:
    def make(**changes: Any) -> Bert:
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 64}
        return Bert(**{**sizes, **changes})

    return make


@pytest.fixture
def make_rows() -> Callable[..., Rows]:
    """Samples `[CLS] ... [SEP]` of the given lengths; with pairs, a [SEP] in the middle too."""

    def make(lengths: Sequence[int], *, pairs: bool = False, seed: int = 0) -> Rows:
        rng = np.random.default_rng(seed)
        samples = [_sample(rng, length, pairs) for length in lengths]
        return Rows(
            sample_ids=rng.integers(0, 2**63, len(lengths)).astype(np.uint64),
            epochs=np.zeros(len(lengths), dtype=np.int64),
            lengths=np.array(lengths, dtype=np.int64),
            tokens=np.concatenate([np.zeros(0, np.uint16), *samples]),
            second_starts=np.array([n // 2 + 1 for n in lengths]) if pairs else None,
            is_next=rng.random(len(lengths)) < 0.5 if pairs else None,
        )

    return make


def _sample(rng: np.random.Generator, length: int, pairs: bool) -> np.ndarray:
    tokens = rng.integers(5, NUM_IDS, length).astype(np.uint16)
    tokens[0], tokens[-1] = CLS, SEP
    if pairs:
        tokens[length // 2] = SEP
    return tokens
