"""The cost of reading a mixture, compared with a single data set.

    python benchmarks/mixtures.py

Compares one data set of `SAMPLES` samples with three of a third of them each, mixed with shares of
50, 30 and 20%; all have random tokens and lengths. Reads, orders and deals all ranks' payloads of
consecutive groups of steps, in this process, alternating between the two streams. The figures are
medians over the rounds, of the first step (with a new order and a new reader) and of the following
groups. They are CPU times, as other work on the machine affects wall-clock times. Then measures the
wall-clock seconds to the first batch through Ray Data, as in a run, for one rank.

Writes benchmarks/results/mixtures.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
from harness import medians, parser_of, scratch_folder, write_result

from elastrata.driver.ray_session import ray_session
from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Source, Start
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.format import FileEntry, Manifest, Vocabulary, shard_schema, write_shard
from elastrata_pipelines.format.manifest import LENGTHS
from elastrata_pipelines.hashing import mix
from elastrata_pipelines.mixture import Leg, MixedOrder, Mixture, shares_to_units
from elastrata_pipelines.order import Order
from elastrata_pipelines.phase import Phase, place_phases
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import RankStream, descriptors, split_dealt_groups

SAMPLES, SEQ_LEN, STRIPE, STRIPES_PER_SHARD = 98_304, 512, 1024, 16
SHARES = (5, 3, 2)
STREAMS = {"one": ["one"], "mixture": ["a", "b", "c"]}
BATCH, STEPS, RANKS, RAY_STEPS = 256, 200, 4, 8
# BERT's vocabulary size.
IDS = 30_522


def write_data_set(folder: Path, samples: int, seed: int) -> Manifest:
    """Write a data set of random tokens, with lengths from 32 to `SEQ_LEN`."""
    rng, storage = np.random.default_rng(seed), Storage(str(folder))
    lengths = rng.integers(32, SEQ_LEN + 1, samples).astype(np.int32)
    for first in range(0, samples, STRIPE):
        # Samples of a stripe are stored longest first, as `prepare` does.
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
    sources = [
        Source(
            name=name, url=str(folder / name), manifest=Manifest.read(Storage(f"{folder}/{name}"))
        )
        for name in names
    ]
    orders = tuple(order_of(source.manifest, seed) for source in sources)
    batches = Batches(
        url=sources[0].url,
        manifest=sources[0].manifest,
        order=orders[0],
        work=WorkModel(linear=6 * 768, quadratic=1),
        tokens_per_micro_batch=8192,
    )
    if len(sources) == 1:
        return batches
    # Constant shares from the first step to the last.
    mixture = Mixture((Leg(shares=shares_to_units(SHARES)),))
    order = MixedOrder(mixture=mixture, orders=orders, firsts=(0,) * len(orders))
    return replace(batches, order=order, sources=tuple(sources))


def phase_of(batches: Batches, steps: int) -> Phase:
    (phase,) = place_phases([Phase(batches=batches, steps=steps, batch_size=BATCH)])
    return phase


def spent(batches: Batches) -> Iterator[float]:
    """Yield the milliseconds of CPU time of each group of steps."""
    phase = phase_of(batches, STEPS)
    reader = phase.batches.stripes()
    for group in phase.groups(Start(), max_tokens=MAX_GROUP_TOKENS):
        start_time = time.process_time()
        for _ in phase.batches.payloads(group, RANKS, reader):
            pass
        yield 1e3 * (time.process_time() - start_time)


def round_of(folder: Path, seed: int) -> dict[str, float]:
    """Measure both streams, alternating by groups; the one that goes first alternates, too."""
    streams = {name: spent(batches_of(folder, parts, seed)) for name, parts in STREAMS.items()}
    milliseconds_by_stream: dict[str, list[float]] = {name: [] for name in STREAMS}
    for turn in count(seed):
        for name in sorted(streams, reverse=bool(turn % 2)):
            if (milliseconds := next(streams[name], None)) is None:
                del streams[name]
            else:
                milliseconds_by_stream[name].append(milliseconds)
        if not streams:
            break
    first = {name: parts[0] for name, parts in milliseconds_by_stream.items()}
    step = {name: sum(parts[1:]) / (STEPS - 1) for name, parts in milliseconds_by_stream.items()}
    return {
        **{f"{name}_first_milliseconds": value for name, value in first.items()},
        **{f"{name}_step_milliseconds": value for name, value in step.items()},
        "throughput_ratio": step["one"] / step["mixture"],
        "first_step_ratio": first["mixture"] / first["one"],
    }


def seconds_to_first_batch(batches: Batches) -> float:
    """Return the seconds to the first batch through Ray Data, planning included."""
    phases = [phase_of(batches, RAY_STEPS)]
    start_time = time.perf_counter()
    (split,) = split_dealt_groups(descriptors(phases, Start()), phases, 1)
    steps = iter(RankStream(split, batches.manifest.token_dtype))
    next(steps)
    seconds = time.perf_counter() - start_time
    # Reads to the end, so that no task of this stream runs during the next measurement.
    assert sum(1 for _ in steps) == RAY_STEPS - 1
    return seconds


def ray_round(folder: Path, seed: int) -> dict[str, float]:
    seconds = {
        name: seconds_to_first_batch(batches_of(folder, STREAMS[name], seed))
        for name in sorted(STREAMS, reverse=bool(seed % 2))
    }
    return {
        **{f"{name}_first_seconds": value for name, value in seconds.items()},
        "first_seconds_ratio": seconds["mixture"] / seconds["one"],
    }


def main() -> None:
    parser = parser_of(__doc__, rounds=25)
    parser.add_argument("--ray-rounds", type=int, default=9)
    arguments = parser.parse_args()
    with scratch_folder() as folder:
        write_data_set(folder / "one", SAMPLES, 0)
        for number, name in enumerate(STREAMS["mixture"], start=1):
            write_data_set(folder / name, SAMPLES // 3, number)
        # Every round has another seed, so that no order is cached; the first round is the warm-up.
        rounds = [round_of(folder, seed) for seed in range(arguments.rounds + 1)][1:]
        with ray_session("local"):
            through_ray = [ray_round(folder, seed) for seed in range(arguments.ray_rounds + 1)][1:]
    figures = {
        "samples": SAMPLES,
        "shares": SHARES,
        "batch_size": BATCH,
        "steps": STEPS,
        "ranks": RANKS,
        "rounds": arguments.rounds,
        **medians(rounds, 3),
        "rounds_through_ray": arguments.ray_rounds,
        **medians(through_ray, 3),
    }
    write_result("mixtures", figures, ["numpy", "pyarrow", "ray"])


if __name__ == "__main__":
    main()
