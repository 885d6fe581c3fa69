"""The stream of a mixture beside that of one data set, in one run.

    python benchmarks/mixtures.py

One data set of `SAMPLES` samples, and three of a third of them each with shares of 50, 30 and 20%,
all of random tokens and lengths; a rank's payloads of consecutive groups of steps, read from files,
ordered and dealt, by turns, in this process. Figures are the medians of the rounds in CPU time: of
the first step, with a new order and a new reader, and of the groups behind it.

Writes benchmarks/results/mixtures.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from harness import medians, parser_of, scratch_folder, write_result

from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Source, Start
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.format import FileEntry, Manifest, Vocabulary, shard_schema, write_shard
from elastrata_pipelines.format.manifest import LENGTHS
from elastrata_pipelines.hashing import mix
from elastrata_pipelines.mixed_order import MixedOrder
from elastrata_pipelines.mixture import Leg, Mixture, in_units
from elastrata_pipelines.order import Order
from elastrata_pipelines.phase import Phase, one_after_another
from elastrata_pipelines.storage import Storage

SAMPLES, SEQ_LEN, STRIPE, STRIPES_PER_SHARD = 98_304, 512, 1024, 16
SHARES = (5, 3, 2)
BATCH, STEPS, RANKS, ROUNDS = 256, 200, 4, 9
IDS = 30_522


def write_data_set(folder: Path, samples: int, seed: int) -> Manifest:
    """Random tokens; lengths from 32 to `SEQ_LEN`."""
    rng, storage = np.random.default_rng(seed), Storage(str(folder))
    lengths = rng.integers(32, SEQ_LEN + 1, samples).astype(np.int32)
    for first in range(0, samples, STRIPE):
        lengths[first : first + STRIPE] = -np.sort(-lengths[first : first + STRIPE])
    size = STRIPE * STRIPES_PER_SHARD
    files = [
        write_shard(storage, f"shards/{first:08d}.parquet", stripes(lengths, first, size, rng))
        for first in range(0, samples, size)
    ]
    with storage.create(LENGTHS) as stream:
        np.save(stream, lengths, allow_pickle=False)
    index = FileEntry(path=LENGTHS, bytes=storage.size(LENGTHS), sha256=storage.sha256(LENGTHS))
    manifest = Manifest(
        samples=samples,
        tokens=int(lengths.sum()),
        stripes=-(-samples // STRIPE),
        stripe_size=STRIPE,
        seq_len=SEQ_LEN,
        seed=seed,
        packing="none",
        pairs=False,
        token_dtype="uint16",
        length_histogram=tuple(np.bincount(lengths, minlength=SEQ_LEN + 1).tolist()),
        vocabulary=Vocabulary(
            size=IDS, pad_id=0, mask_id=103, special_ids=(0,), continuation_ids=()
        ),
        tokenizer_fingerprint="random",
        sources=(),
        files=(*files, index),
    )
    manifest.write(storage)
    return manifest


def stripes(
    lengths: np.ndarray, first: int, size: int, rng: np.random.Generator
) -> Iterator[pa.Table]:
    for begin in range(first, min(first + size, len(lengths)), STRIPE):
        part = lengths[begin : begin + STRIPE]
        tokens = rng.integers(0, IDS, int(part.sum())).astype("<u2")
        offsets = np.concatenate([[0], np.cumsum(part, dtype=np.int64)]) * 2
        column = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(part), [None, pa.py_buffer(offsets), pa.py_buffer(tokens)]
        )
        ids = pa.array(mix(np.arange(begin, begin + len(part))))
        schema = shard_schema(packed=False, pairs=False)
        yield pa.table([ids, pa.array(part), column], schema=schema)


def order_of(manifest: Manifest, seed: int) -> Order:
    return Order(num_samples=manifest.samples, stripe_size=STRIPE, window_stripes=8, seed=seed)


def batches_of(folder: Path, names: list[str], seed: int) -> Batches:
    found = [
        Source(
            name=name, url=str(folder / name), manifest=Manifest.read(Storage(f"{folder}/{name}"))
        )
        for name in names
    ]
    orders = tuple(order_of(source.manifest, seed) for source in found)
    batches = Batches(
        url=found[0].url,
        manifest=found[0].manifest,
        order=orders[0],
        work=WorkModel(linear=6 * 768, quadratic=1),
        tokens_per_micro_batch=8192,
    )
    if len(found) == 1:
        return batches
    mixture = Mixture((Leg(shares=in_units(SHARES)),))
    order = MixedOrder(mixture=mixture, orders=orders, firsts=(0,) * len(orders))
    return replace(batches, order=order, sources=tuple(found))


def milliseconds(batches: Batches) -> dict[str, float]:
    """Of the first step, and of each behind it."""
    (phase,) = one_after_another([Phase(batches=batches, steps=STEPS, batch_size=BATCH)])
    groups = phase.groups(Start(), max_tokens=MAX_GROUP_TOKENS)
    reader, spent = phase.batches.stripes(), list[float]()
    for group in groups:
        began = time.process_time()
        for _ in phase.batches.payloads(group, RANKS, reader):
            pass
        spent.append(time.process_time() - began)
    return {"first": 1e3 * spent[0], "step": 1e3 * sum(spent[1:]) / (STEPS - 1)}


def main() -> None:
    parser_of(__doc__).parse_args()
    with scratch_folder() as folder:
        write_data_set(folder / "one", SAMPLES, 0)
        names = ["a", "b", "c"]
        for seed, name in enumerate(names):
            write_data_set(folder / name, SAMPLES // 3, seed + 1)
        rounds = []
        for seed in range(ROUNDS):  # a seed of its own: no order is known already
            one = milliseconds(batches_of(folder, ["one"], seed))
            mixed = milliseconds(batches_of(folder, names, seed))
            rounds.append(
                {
                    **{f"one_{name}_milliseconds": value for name, value in one.items()},
                    **{f"mixture_{name}_milliseconds": value for name, value in mixed.items()},
                    "throughput_ratio": one["step"] / mixed["step"],
                    "first_step_ratio": mixed["first"] / one["first"],
                }
            )
    figures = {
        "samples": SAMPLES,
        "shares": SHARES,
        "batch_size": BATCH,
        "steps": STEPS,
        "ranks": RANKS,
        "rounds": ROUNDS,
        **medians(rounds, 3),
    }
    write_result("mixtures", figures, ["numpy", "pyarrow"])


if __name__ == "__main__":
    main()
