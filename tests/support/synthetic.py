"""A data set of random tokens, written without a tokenizer; and a tiny recipe that trains on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from elastrata_pipelines.format import (
    HELD_OUT,
    FileEntry,
    Manifest,
    Vocabulary,
    shard_schema,
    write_shard,
)
from elastrata_pipelines.format.manifest import LENGTHS
from elastrata_pipelines.hashing import mix
from elastrata_pipelines.storage import Storage

SEQ_LEN, VOCABULARY, STRIPE, STRIPES_PER_SHARD = 48, 97, 32, 2
MODERNBERT = {
    "name": "modernbert",
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 2,
    "max_positions": SEQ_LEN,
    "window": 8,
    "attention_dropout": 0.1,
}
"""A ModernBERT of all three kinds of blocks: the first, local ones, and a global one with a norm
before it. Samples are shorter than its window, and up to six times as long as the half of it, and
longer: attention takes each of its ways."""
_LENGTHS_PER_MEAN = 3.84
"""The longest sample over the mean, before lengths are cut."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the parts of a data set are."""

    seq_len: int = SEQ_LEN
    stripe: int = STRIPE
    stripes_per_shard: int = STRIPES_PER_SHARD


def write_data_set(
    folder: Path | str,
    samples: int,
    seed: int = 0,
    *,
    pairs: bool = False,
    held_out: int = 0,
    sizes: Sizes = Sizes(),
) -> Manifest:
    """Writes `samples` samples of uneven lengths, each one token over and over: easy to learn.

    In pairs the second sentence begins in the middle, and every other one follows the first. So
    many samples as `held_out` says are held out of them, of the next seed.
    """
    if held_out:
        inner = write_data_set(f"{folder}/{HELD_OUT}", held_out, seed + 1, pairs=pairs, sizes=sizes)
    rng = np.random.default_rng(seed)
    storage = Storage(str(folder))
    lengths = 4 + rng.geometric(_LENGTHS_PER_MEAN / sizes.seq_len, samples)
    lengths = np.minimum(sizes.seq_len, lengths).astype(np.int32)
    for stripe in range(0, samples, sizes.stripe):
        lengths[stripe : stripe + sizes.stripe] = -np.sort(-lengths[stripe : stripe + sizes.stripe])
    stripes = list(_stripes(lengths, rng, seed, sizes.stripe, pairs=pairs))
    step = sizes.stripes_per_shard
    files = [
        write_shard(storage, f"shards/{i:05d}.parquet", stripes[i : i + step])
        for i in range(0, len(stripes), step)
    ]
    with storage.create(LENGTHS) as stream:
        np.save(stream, lengths, allow_pickle=False)
    files.append(
        FileEntry(path=LENGTHS, bytes=storage.size(LENGTHS), sha256=storage.sha256(LENGTHS))
    )
    manifest = Manifest(
        samples=samples,
        tokens=int(lengths.sum()),
        stripes=len(stripes),
        stripe_size=sizes.stripe,
        seq_len=sizes.seq_len,
        seed=seed,
        packing="none",
        pairs=pairs,
        token_dtype="uint16",
        length_histogram=tuple(np.bincount(lengths, minlength=sizes.seq_len + 1).tolist()),
        vocabulary=Vocabulary(
            size=VOCABULARY, pad_id=0, mask_id=4, special_ids=(0, 1, 2, 3, 4), continuation_ids=()
        ),
        tokenizer_fingerprint="synthetic",
        sources=(),
        files=tuple(files),
        held_out=inner.fingerprint if held_out else None,
    )
    manifest.write(storage)
    return manifest


def _stripes(
    lengths: np.ndarray, rng: np.random.Generator, seed: int, size: int, *, pairs: bool
) -> Iterator[pa.Table]:
    for first in range(0, len(lengths), size):
        part = lengths[first : first + size]
        tokens = np.repeat(rng.integers(5, VOCABULARY, len(part)), part).astype("<u2")
        offsets = np.concatenate([[0], np.cumsum(part, dtype=np.int64)]) * 2
        ids = mix(np.arange(first, first + len(part)) + seed * 1_000_003)
        column = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(part), [None, pa.py_buffer(offsets), pa.py_buffer(tokens)]
        )
        halves = [pa.array(part // 2), pa.array(np.arange(len(part)) % 2 == 0)] if pairs else []
        yield pa.table(
            [pa.array(ids), pa.array(part), column, *halves],
            schema=shard_schema(packed=False, pairs=pairs),
        )


def tiny_recipe(data: Path | str, storage: Path | str, **changes: Any) -> dict[str, Any]:
    """A recipe as a dict: BERT of two layers, two steps; `changes` replace top-level keys."""
    return {
        "workload": {"name": "bert", "hidden_size": 32, "num_layers": 2, "num_heads": 2},
        "data": {"path": str(data), "window_stripes": 4},
        "steps": 2,
        "batch_size": 21,
        "micro_batch_tokens": 128,
        "optimizer": {"lr": 1e-3},
        "workers": {"min": 1, "max": 1, "cpus": 0.4, "threads": 1, "spares": False},
        "evaluation": {"every": 1000},
        "checkpoint": {"every": 1000},
        "storage": str(storage),
        **changes,
    }


def fields_of(manifest: Manifest) -> dict[str, Any]:
    """The values of its fields, from which another one is made."""
    return {name: getattr(manifest, name) for name in Manifest.model_fields}
