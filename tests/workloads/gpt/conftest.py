"""A small vocabulary, rows of random tokens, plain or packed, and tiny GPTs of several styles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.gpt import Gpt

NUM_IDS, PAD = 97, 1
LLAMA = {
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "bias": False,
    "tied_embeddings": False,
    "num_kv_heads": 2,
    "intermediate_size": 48,
}
STYLES = {
    "gpt2": {},
    "llama": LLAMA,
    "stable": {**LLAMA, "qk_norm": True, "z_loss": 0.01},
    "mixed": {"norm": "rms", "num_kv_heads": 1, "bias": False, "tied_embeddings": False},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(
        size=NUM_IDS, pad_id=PAD, mask_id=None, special_ids=(0, PAD), continuation_ids=()
    )


@pytest.fixture
def make_gpt() -> Callable[..., Gpt]:
    def make(style: str = "gpt2", **changes: Any) -> Gpt:
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 64}
        return Gpt(**{**sizes, **STYLES[style], **changes})

    return make


@pytest.fixture
def make_rows() -> Callable[..., Rows]:
    """Samples of random tokens of the given lengths; packed: all of them in one sample."""

    def make(lengths: Sequence[int], *, packed: bool = False, seed: int = 0) -> Rows:
        rng = np.random.default_rng(seed)
        samples = [rng.integers(2, NUM_IDS, length).astype(np.uint16) for length in lengths]
        ids = rng.integers(0, 2**63, len(lengths)).astype(np.uint64)
        tokens = np.concatenate([np.zeros(0, np.uint16), *samples])
        if packed:
            return Rows(
                sample_ids=ids[:1],
                epochs=np.zeros(1, np.int64),
                lengths=np.array([len(tokens)]),
                tokens=tokens,
                boundaries=(np.cumsum(lengths)[:-1].astype(np.int32),),
            )
        return Rows(
            sample_ids=ids,
            epochs=np.zeros(len(lengths), dtype=np.int64),
            lengths=np.array(lengths, dtype=np.int64),
            tokens=tokens,
        )

    return make
