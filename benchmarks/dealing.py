"""The cost of dealing to the stream, beside the step that it hides behind.

    python benchmarks/dealing.py ../shared/data/wikipedia_lengths_512.json

`deal` is the deal alone; `payloads` is all that a reading task does for a step but for the reading:
the order, the deal, and every rank's rows written as its payload, from stripes in memory. Both are
milliseconds of CPU time per step, the median of the rounds. Putting payloads into Ray's object
store is not counted. `by_speed` deals to ranks of four kinds, by turns with the deal to equal ones.

Beside it stands the time of a step of BERT-large on so many GPUs, estimated: FLOPs of a rank's
share of the batch at 40% of the device's dense bf16 peak, and no time at all for communication, so
the real one is longer. The stream works ahead: its tasks deal step k + 1 while the workers compute
step k, so that dealing delays a step only where it takes longer than the step itself. Two tasks
read at a time, which halves what counts.

Writes benchmarks/results/dealing.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
from harness import parser_of, write_result
from typing_extensions import override

from elastrata.bench.samples import read_histogram
from elastrata.recipe.file import load_recipe
from elastrata_pipelines.balance import drawn_batches
from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches
from elastrata_pipelines.deal import Ints, deal
from elastrata_pipelines.format import Manifest, Vocabulary, shard_schema
from elastrata_pipelines.groups import Group
from elastrata_pipelines.hashing import mix
from elastrata_pipelines.order import Order
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import CONCURRENT_READERS
from elastrata_pipelines.stripes import Stripes

RANKS = (1, 64, 1024)
SAMPLES_EACH = 16
ROUNDS = 11
STRIPE = 1024
BUDGET = 8192
RECIPE = "bert/large"
VOCABULARY = Vocabulary(
    size=30522, pad_id=0, mask_id=103, special_ids=(0, 100, 101, 102, 103), continuation_ids=()
)
FOUR_KINDS = (256, 205, 128, 64)
"""Speeds: 1, 0.8, 0.5 and 0.25 of the fastest kind's."""
PEAK_TFLOPS = {"A100": 312, "H100": 989}
SHARE_OF_PEAK = 0.4


class MemoryStripes(Stripes):
    """Stripes of random tokens that lie in memory."""

    def __init__(self, lengths: Ints) -> None:
        super().__init__(cast(Storage, None), cast(Manifest, None))  # asked for nothing
        self._tables = [
            _stripe(first, -np.sort(-lengths[first : first + STRIPE]))
            for first in range(0, len(lengths), STRIPE)
        ]

    @override
    def read(self, stripes: Sequence[int]) -> list[pa.Table]:
        return [self._tables[number] for number in stripes]


def _stripe(first: int, lengths: Ints) -> pa.Table:
    tokens = np.random.default_rng(first).integers(0, 30522, int(lengths.sum())).astype("<u2")
    offsets = np.concatenate([[0], np.cumsum(lengths)]) * 2
    column = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(tokens)]
    )
    ids = mix(np.arange(first, first + len(lengths)))
    return pa.table(
        [pa.array(ids), pa.array(lengths.astype(np.int32)), column],
        schema=shard_schema(packed=False, pairs=False),
    )


def deal_milliseconds(
    batches: Batches, drawn: Sequence[Ints], ranks: int
) -> tuple[float, float, float]:
    """Of a deal to equal ranks, of one by speed, and the latter's largest imbalance of time."""
    kinds = (FOUR_KINDS * ranks)[:ranks]
    imbalances = []

    def run(lengths: Ints, speeds: Sequence[int]) -> None:
        dealt = deal(
            lengths,
            num_ranks=ranks,
            work=batches.work,
            tokens_per_micro_batch=batches.tokens_per_micro_batch,
            speeds=tuple(speeds),
        )
        if speeds:
            imbalances.append(dealt.imbalance)

    taken = [
        [milliseconds(lambda s=s, lengths=lengths: run(lengths, s)) for s in ((), kinds)]
        for lengths in drawn
    ]
    equal, by_speed = (statistics.median(each) for each in zip(*taken[1:], strict=True))
    return equal, by_speed, max(imbalances)


def milliseconds(run: Callable[[], object]) -> float:
    """CPU time."""
    began = time.process_time()
    run()
    return 1e3 * (time.process_time() - began)


def payload_milliseconds(
    batches: Batches, stripes: MemoryStripes, group: Group, ranks: int
) -> float:
    def write() -> None:
        for _ in batches.payloads(group, ranks, stripes):
            pass

    taken = [milliseconds(write) for _ in range(ROUNDS // 2 + 1)]
    return statistics.median(taken[1:]) / group.num_steps


def measure(histogram: Sequence[int], ranks: int) -> dict[str, Any]:
    size = ranks * SAMPLES_EACH
    drawn = list(drawn_batches(histogram, batch_size=size, steps=ROUNDS + 1))
    steps = max(1, MAX_GROUP_TOKENS // int(np.mean([lengths.sum() for lengths in drawn])))
    samples = np.concatenate(list(drawn_batches(histogram, batch_size=size, steps=steps)))
    batches = Batches(
        url="",
        manifest=cast(Manifest, None),  # payloads() asks it for nothing
        order=Order(num_samples=len(samples), stripe_size=STRIPE, window_stripes=8, seed=0),
        work=load_recipe(RECIPE).workload.work(VOCABULARY),
        tokens_per_micro_batch=BUDGET,
    )
    group = Group(first_step=0, first_position=0, num_steps=steps, batch_size=size)
    dealing, by_speed, imbalance = deal_milliseconds(batches, drawn, ranks)
    writing = payload_milliseconds(batches, MemoryStripes(samples), group, ranks)
    return {
        "ranks": ranks,
        "samples_per_step": size,
        "deal_microseconds_per_sample": round(1e3 * dealing / size, 3),
        "deal_milliseconds_per_step": round(dealing, 3),
        "by_speed_milliseconds_per_step": round(by_speed, 3),
        "by_speed_over_equal": round(by_speed / dealing, 2),
        "largest_time_imbalance_by_speed": round(imbalance, 4),
        "payloads_milliseconds_per_step": round(writing, 3),
        "steps_per_group": steps,
        "step_milliseconds": {
            device: round(step_milliseconds(drawn[0], ranks, peak), 1)
            for device, peak in PEAK_TFLOPS.items()
        },
    }


def step_milliseconds(lengths: Ints, ranks: int, peak_tflops: float) -> float:
    """The time of one rank's share of a batch."""
    predictions = 0.15 * float(lengths.sum())
    flops = load_recipe(RECIPE).workload.flops(lengths.tolist(), {"mlm": predictions}, VOCABULARY)
    return 1e3 * flops / ranks / (SHARE_OF_PEAK * 1e12 * peak_tflops)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("histogram", help="wikipedia_lengths_512.json")
    histogram = read_histogram(parser.parse_args().histogram)
    figures = {
        "model": RECIPE,
        "share_of_peak": SHARE_OF_PEAK,
        "concurrent_readers": CONCURRENT_READERS,
        "rows": [measure(histogram, ranks) for ranks in RANKS],
    }
    write_result("dealing", figures, ("numpy", "pyarrow"))


if __name__ == "__main__":
    main()
