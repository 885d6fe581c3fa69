"""Tokens per second of ranks of unequal speed: equal shares, and shares by measured speed.

    python benchmarks/mixed_machines.py ../shared/data/wikipedia_lengths_512.json

Gloo ranks of one thread train BERT with the engine's own loop on samples of random lengths. A
kernel quota limits each rank to a share of a core (one cgroup per rank, which needs root). All
compared runs have the same quotas. Every rank has a whole copy of the model, the best choice for a
small model on a slow network (`parallel.replicate: all`). A run consists of these parts, in order:

- equal: the deal assumes equal speeds of all ranks;
- dealt: by measured speeds, as with `workers.speeds: measured`; steps whose batches were read
  before the speeds were measured do not count;
- freed: the slow ranks get the quota of the fastest one, then their former quota, to show how the
  shares follow.

`alone` trains every rank by itself on the same samples, all at the same time, so that they share
the machine's caches as in a run. The sum of their speeds, without waiting and communication, is the
ideal. `even_machines` is the speed of as many ranks with equal quotas and the same sum: its
distance from the ideal is the cost of training together, not of unequal speeds. `cpu_elsewhere` is
the number of cores that other processes used meanwhile.

Writes benchmarks/results/mixed_machines.json and mixed_machines.png.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, known_result, on_ranks, parser_of, picture, write_result

from elastrata.bench.samples import read_histogram
from elastrata.optim.optimizer import build_optimizer
from elastrata.recipe.file import load_recipe
from elastrata.step.events import Event, Paced, Slowed
from elastrata.step.records import StepRecord
from elastrata.step.step_message import Effort
from elastrata.trainer.balancing import PaceMonitor, RankPlace
from elastrata.trainer.build_model import build_divided_model
from elastrata.trainer.trainer import LoopHooks, build_loop
from elastrata_pipelines.balance import draw_batches
from elastrata_pipelines.batches import Start
from elastrata_pipelines.deal import deal
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.speeds import Speeds

# Each sum is below two cores, so that a machine with two cores can grant the quotas.
SHARES = ((0.8, 0.4), (0.6, 0.48, 0.3), (0.6, 0.48, 0.3, 0.15))
"""Quotas in cores, by rank, for each group size."""
OVERRIDES = (
    # Never read: the batches are generated here.
    "data.path=/none",
    "schedule.warmup_steps=0",
    "steps=1000",
    "parallel.replicate=all",
)
SAMPLES_EACH, BUDGET, SEQ_LEN = 32, 8192, 512
AHEAD = 20
"""Steps that are already read when new speeds take effect, as with the readers of a cluster."""
EQUAL_STEPS, DEALT_STEPS, FREED_STEPS, WARM_UP = 14, 52, 40, 3
ALONE_STEPS = 6
"""Steps of the slowest rank alone; faster ranks take more in the same time."""
EVEN_STEPS = EQUAL_STEPS + DEALT_STEPS
# Much shorter than a step, so that a quota acts like a slower core.
PERIOD = 10_000
"""Accounting period of the kernel's quota, in microseconds."""
# Version 1 of cgroups.
CGROUPS = Path("/sys/fs/cgroup/cpu")
# Of no tokenizer: the tokens are random ids.
VOCABULARY = Vocabulary(
    size=8192, pad_id=0, mask_id=103, special_ids=(0, 100, 101, 102, 103), continuation_ids=()
)


class Quota:
    """Context manager that limits this process to a share of a core."""

    def __init__(self) -> None:
        self._folder = CGROUPS / f"mixed-machines-{os.getpid()}"

    def __enter__(self) -> Quota:
        self._folder.mkdir()
        (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD), encoding="utf-8")
        (self._folder / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        return self

    def limit(self, share: float) -> None:
        """Set the share from now on."""
        (self._folder / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD)), encoding="utf-8")

    def __exit__(self, *error: object) -> None:
        # Only an empty cgroup can be removed.
        (CGROUPS / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        self._folder.rmdir()


class Batches:
    """Global batches of random lengths, dealt to ranks on demand."""

    def __init__(self, histogram: Sequence[int], batch_size: int, recipe: Any) -> None:
        self._histogram, self._batch_size = histogram, batch_size
        self._work = recipe.workload.work(VOCABULARY)

    def steps(
        self, rank: int, ranks: int, count: int, speeds: Callable[[int], Speeds]
    ) -> Iterator[RankStep]:
        batch_lengths = draw_batches(self._histogram, batch_size=self._batch_size, steps=count)
        for number, lengths in enumerate(batch_lengths):
            step_speeds = speeds(number + 1)
            dealt_batch = deal(
                lengths,
                num_ranks=ranks,
                work=self._work,
                tokens_per_micro_batch=BUDGET,
                speeds=step_speeds,
            )
            hand = dealt_batch.hands[rank]
            yield RankStep(
                step=number + 1,
                rows=self._select_rows(number, lengths, hand.rows),
                cuts=hand.cuts,
                imbalance=dealt_batch.imbalance,
                work=int(self._work(lengths[hand.rows]).sum()),
                speeds=step_speeds,
            )

    def _select_rows(self, number: int, lengths: np.ndarray, which: np.ndarray) -> Rows:
        # Seeded by the step: every rank, and every run, gets the same tokens.
        draw = np.random.default_rng(number)
        # Ids below 104 are special.
        tokens = draw.integers(104, VOCABULARY.size, int(lengths.sum()), dtype=np.uint16)
        ends = np.cumsum(lengths)
        parts = [tokens[ends[row] - lengths[row] : ends[row]] for row in which]
        return Rows(
            sample_ids=(which + number * self._batch_size).astype(np.uint64),
            epochs=np.zeros(len(which), dtype=np.int64),
            lengths=lengths[which],
            tokens=np.concatenate([tokens[:0], *parts]),
        )


class Hands:
    """Speeds for future steps, as measured by this rank.

    All ranks see the same measurements and reach the same decisions.
    """

    def __init__(self, ranks: int, first: int) -> None:
        self._by_step: dict[int, Speeds] = {}
        self._first, self._step = first, 0
        self.events: list[Event] = []
        places = [RankPlace("", f"rank-{n}", "CPU") for n in range(ranks)]
        self._pacing = PaceMonitor(places, list(range(ranks)), deals=True, tell=self._tell)

    def __call__(self, step: int) -> Speeds:
        earlier_steps = [first for first in self._by_step if first <= step]
        return self._by_step[max(earlier_steps)] if earlier_steps else ()

    def measured(self, rank_step: RankStep, efforts: Sequence[Effort]) -> None:
        self._step = rank_step.step
        if rank_step.step >= self._first:
            self._pacing(rank_step, efforts)

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Paced):
            self._by_step[event.step + AHEAD] = event.speeds


def on_rank(
    rank: int,
    ranks: int,
    histogram: Sequence[int],
    shares: Sequence[Sequence[float]],
    first: int = EQUAL_STEPS,
) -> dict[str, Any]:
    """Train a run on this rank and return its step records and events.

    Args:
        rank: this rank.
        ranks: number of ranks.
        histogram: histogram of sample lengths.
        shares: quotas in cores, by step and rank.
        first: step from which speeds are measured.
    """
    recipe = load_recipe("bert/tiny", OVERRIDES)
    device, steps = torch.device("cpu"), len(shares)
    divided = build_divided_model(recipe, VOCABULARY, SEQ_LEN, device, ranks)
    blocks = recipe.workload.blocks(divided.model)
    optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
    loop = build_loop(recipe, divided.clip, VOCABULARY, device, ranks, blocks=blocks)
    batch_size = SAMPLES_EACH * len(shares[0])
    step_speeds = Hands(ranks, first)
    stream = Batches(histogram, batch_size, recipe).steps(rank, ranks, steps, step_speeds)
    records: list[StepRecord] = []
    with Quota() as quota:
        quota.limit(shares[0][rank])
        run = loop.run(
            divided.forward_backward,
            optimizer,
            stream,
            Start(),
            LoopHooks(on_times=step_speeds.measured),
        )
        for record, _ in run:
            records.append(record)
            if record.step < steps:
                # The quota of the next step: steps count from 1, `shares` from 0.
                quota.limit(shares[record.step][rank])
    events = [event for event in step_speeds.events if isinstance(event, Paced | Slowed)]
    return {"records": records, "told": events}


def alone(rank: int, share: float, steps: int, ranks: int, histogram: Sequence[int]) -> float:
    """Return the tokens per second of a single rank with a quota, which trains whole batches."""
    # The other shares only determine the batch size: there are no such ranks.
    result = on_rank(0, 1, histogram, [[share] + [0.0] * (ranks - 1)] * steps)
    return tokens_per_second(result["records"][1:])


def each_alone(shares: Sequence[float], histogram: Sequence[int]) -> list[float]:
    """Return the tokens per second of every rank by itself, all running at the same time."""

    def one(share: float) -> float:
        steps = round(ALONE_STEPS * share / min(shares)) + 1
        speeds: list[float] = on_ranks(1, alone, share, steps, len(shares), histogram)
        return speeds[0]

    with ThreadPoolExecutor(len(shares)) as threads:
        return list(threads.map(one, shares))


def tokens_per_second(records: Sequence[StepRecord]) -> float:
    """Return the median over the steps."""
    # A median, as other work on a shared machine comes and goes.
    return statistics.median(r.batch_tokens / r.seconds for r in records)


def measure(shares: Sequence[float], histogram: Sequence[int]) -> dict[str, Any]:
    ranks, equal_quotas = len(shares), [max(shares)] * len(shares)
    with elsewhere() as cpu:
        speeds_alone = each_alone(shares, histogram)
        fixed_quotas = [list(shares)] * (EQUAL_STEPS + DEALT_STEPS)
        # Only two ranks continue with this part, for the picture.
        there_and_back = [equal_quotas] * FREED_STEPS + [list(shares)] * FREED_STEPS
        rank_results = on_ranks(
            ranks, on_rank, ranks, histogram, fixed_quotas + (there_and_back if ranks == 2 else [])
        )
        even_quotas = [[sum(shares) / ranks] * ranks] * EVEN_STEPS
        even_records = on_ranks(ranks, on_rank, ranks, histogram, even_quotas, EVEN_STEPS + 1)[0][
            "records"
        ]
    records, events = rank_results[0]["records"], rank_results[0]["told"]
    first = next(r.step for r in records if r.speeds)
    equal_records = records[WARM_UP:EQUAL_STEPS]
    dealt_records = records[first + WARM_UP : EQUAL_STEPS + DEALT_STEPS]
    equal_speed, dealt_speed = tokens_per_second(equal_records), tokens_per_second(dealt_records)
    even_speed = tokens_per_second(even_records[WARM_UP:])
    ideal_speed = sum(speeds_alone)
    return {
        "shares_of_a_core": list(shares),
        "tokens_per_second": {
            "equal_hands": round(equal_speed),
            "dealt_by_speed": round(dealt_speed),
            "even_machines": round(even_speed),
            "each_alone": [round(one) for one in speeds_alone],
            "ideal": round(ideal_speed),
        },
        "dealt_over_equal": round(dealt_speed / equal_speed, 3),
        "dealt_over_ideal": round(dealt_speed / ideal_speed, 3),
        "even_over_ideal": round(even_speed / ideal_speed, 3),
        "time_imbalance": {
            "equal_hands": median_imbalance(equal_records),
            "dealt_by_speed": median_imbalance(dealt_records),
        },
        "first_dealt_step": first,
        "told": [event_of(event) for event in events],
        "largest_difference_of_losses": max(
            abs(one.loss - other.loss) / other.loss
            for one, other in zip(records, even_records, strict=False)
        ),
        "digests_are_equal": all(
            one.digest == other.digest for one, other in zip(records, even_records, strict=False)
        ),
        "cpu_elsewhere": round(cpu[0], 2),
        "speeds_by_step": {r.step: list(r.speeds) for r in records if r.speeds},
        "time_imbalances": [round(r.time_imbalance or 0.0, 3) for r in records],
    }


def median_imbalance(records: Sequence[StepRecord]) -> float:
    return round(statistics.median(r.time_imbalance or 0.0 for r in records), 4)


def event_of(event: Paced | Slowed) -> dict[str, Any]:
    if isinstance(event, Paced):
        return {"step": event.step, "speeds": list(event.speeds)}
    return {"step": event.step, "text": event.text}


@contextmanager
def elsewhere() -> Iterator[list[float]]:
    """Measure the cores that other processes used while the block ran."""

    def busy() -> float:
        # The two skipped fields of /proc/stat are idle time and time waiting for I/O.
        user, nice, system, _, _, *interrupts = (
            int(word)
            for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n")[0].split()[1:8]
        )
        return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")

    def own() -> float:
        return sum(os.times()[:4])

    cores: list[float] = []
    start_time, busy_before, own_before = time.perf_counter(), busy(), own()
    yield cores
    seconds = time.perf_counter() - start_time
    cores.append((busy() - busy_before - (own() - own_before)) / seconds)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the shares of work of two ranks over time."""
    figure = picture(7, 3)
    axes = figure.subplots()
    steps = len(found["time_imbalances"])
    shares = [[1 / len(found["shares_of_a_core"])] * len(found["shares_of_a_core"])]
    for step in range(1, steps + 1):
        speeds = found["speeds_by_step"].get(step)
        shares.append([s / sum(speeds) for s in speeds] if speeds else shares[-1])
    for rank, work_shares in enumerate(zip(*shares[1:], strict=True)):
        axes.step(
            range(1, steps + 1), work_shares, where="mid", label=f"rank {rank}'s share of the work"
        )
    # An imbalance of 1 is perfect.
    times = [value - 1 for value in found["time_imbalances"]]
    axes.plot(range(1, steps + 1), times, color="gray", lw=0.8, label="time imbalance - 1")
    for step, text in (
        (EQUAL_STEPS, "speeds are measured"),
        (EQUAL_STEPS + DEALT_STEPS, "freed"),
        (EQUAL_STEPS + DEALT_STEPS + FREED_STEPS, "throttled again"),
    ):
        axes.axvline(step, color="black", lw=0.6, ls=":")
        axes.annotate(text, (step, 0.97), xycoords=("data", "axes fraction"), rotation=90, va="top")
    axes.set(xlabel="step", ylim=(0, 0.9))
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("lengths", type=Path, help="a histogram of lengths, as JSON")
    parser.add_argument("--ranks", type=int, nargs="*", default=[len(s) for s in SHARES])
    arguments = parser.parse_args()
    histogram = read_histogram(arguments.lengths)
    before = known_result("mixed_machines").get("measured", [])
    figures_by_size = {len(one["shares_of_a_core"]): one for one in before}
    for shares in SHARES:
        if len(shares) in arguments.ranks:
            figures_by_size[len(shares)] = measure(shares, histogram)
    if 2 in arguments.ranks:
        draw(figures_by_size[2], RESULTS / "mixed_machines.png")
    figures = {"measured": [figures_by_size[ranks] for ranks in sorted(figures_by_size)]}
    write_result("mixed_machines", figures, ("elastrata", "torch", "numpy"))


if __name__ == "__main__":
    main()
