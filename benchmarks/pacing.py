"""What it costs equal ranks that their speeds are measured.

    python benchmarks/pacing.py

The parts that a step has more, each by itself, in microseconds of CPU time:

- hooks: the clock around the forward passes of a model's blocks (`core/own_time.py`);
- message: the efforts of all ranks, written into the numbers that travel with the losses, and read;
- pacing: rank 0's look at them (`trainer/pacing.py`), whose ranks differ by noise alone.

The sum is that of rank 0; the others have no pacing. `share_of_step` is the sum over the time of
the passes of BERT-mini on one CPU thread, 16 samples a rank of 128 tokens, measured here. The
hooks are those of a model of BERT-large's depth.

Writes benchmarks/results/pacing.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import medians, parser_of, write_result
from torch import nn

from elastrata.core.control_signal import Action
from elastrata.core.own_time import own_time
from elastrata.core.step_message import Effort, StepMessage, written
from elastrata.recipe.file import load_recipe
from elastrata.trainer.pacing import Pacing, RankPlace
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows

RANKS = (2, 8, 64, 1024)
STEPS = 200
BLOCKS = 24
"""As many as BERT-large has."""
NOISE = 0.03
SAMPLES, TOKENS = 16, 128
VOCABULARY = Vocabulary(
    size=8192, pad_id=0, mask_id=103, special_ids=(0, 100, 101, 102, 103), continuation_ids=()
)
CPU = torch.device("cpu")


def microseconds(run: Callable[[], object], times: int) -> float:
    """CPU time of one of them."""
    began = time.process_time()
    for _ in range(times):
        run()
    return 1e6 * (time.process_time() - began) / times


def hooks() -> float:
    """Of a step of one micro-batch."""
    blocks = [nn.Identity() for _ in range(BLOCKS)]

    def passes() -> None:
        for block in blocks:
            block(None)

    plain = microseconds(passes, STEPS)
    own = own_time(CPU, blocks)

    def measured() -> None:
        own.begin()
        passes()
        own.effort(1.0)

    return microseconds(measured, STEPS) - plain


def message(ranks: int) -> float:
    """Beside the message of a lone rank, which has no efforts."""

    def travel(world_size: int) -> None:
        numbers = written(
            Action.GO_ON, Effort(1.0, 1.0), None, (), CPU, world_size=world_size, is_primary=True
        )
        StepMessage.read(numbers.tolist(), (), world_size)

    return microseconds(lambda: travel(ranks), STEPS) - microseconds(lambda: travel(1), STEPS)


def pacing(ranks: int) -> float:
    """Of rank 0, which looks every few steps."""
    draw = np.random.default_rng(ranks)
    places = [RankPlace("", str(n), "CPU") for n in range(ranks)]
    look = Pacing(places, range(ranks), deals=True, tell=lambda event: None)
    drawn = draw.normal(1, NOISE, (STEPS, ranks)).tolist()
    steps = [
        (_step(number + 1), [Effort(seconds, 1.0) for seconds in row])
        for number, row in enumerate(drawn)
    ]
    left = iter(steps)
    return microseconds(lambda: look(*next(left)), STEPS)


def _step(number: int) -> RankStep:
    nothing = np.zeros(0, dtype=np.int64)
    rows = Rows(
        sample_ids=nothing.astype(np.uint64),
        epochs=nothing,
        lengths=nothing,
        tokens=nothing.astype(np.uint16),
    )
    return RankStep(step=number, rows=rows, cuts=(0, 0), imbalance=1.0, work=0)


def step_milliseconds() -> float:
    """CPU time of the passes of BERT-mini, without the optimizer's."""
    workload = load_recipe("bert/mini", ["data.path=/none"]).workload
    draw = np.random.default_rng(0)
    rows = Rows(
        sample_ids=np.arange(SAMPLES, dtype=np.uint64),
        epochs=np.zeros(SAMPLES, dtype=np.int64),
        lengths=np.full(SAMPLES, TOKENS),
        tokens=draw.integers(104, VOCABULARY.size, SAMPLES * TOKENS, dtype=np.uint16),
    )
    model = workload.build_model(VOCABULARY, TOKENS)
    batch = workload.collate(rows, VOCABULARY, 0)

    def passes() -> None:
        workload.loss(model, batch).terms["mlm"].backward()

    passes()
    return microseconds(passes, 5) / 1e3


def measure() -> dict[str, float]:
    found = {"step_milliseconds": step_milliseconds(), "hooks": hooks()}
    for ranks in RANKS:
        found |= {f"message_{ranks}": message(ranks), f"pacing_{ranks}": pacing(ranks)}
        whole = found["hooks"] + found[f"message_{ranks}"] + found[f"pacing_{ranks}"]
        found[f"share_of_step_{ranks}"] = whole / (1e3 * found["step_milliseconds"])
    return found


def main() -> None:
    rounds = parser_of(__doc__, rounds=5).parse_args().rounds
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"blocks": BLOCKS, "rounds": rounds}
    figures |= medians([measure() for _ in range(rounds)], 5)
    write_result("pacing", figures, ("elastrata", "torch", "numpy"))


if __name__ == "__main__":
    main()
