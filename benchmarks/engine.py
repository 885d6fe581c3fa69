"""The cost of the engine: steps/s of `elastrata train` beside a bare PyTorch loop.

    python benchmarks/engine.py DATA_SET

Both run BERT-mini over the same micro-batches of the same steps with one thread, the same AdamW
and the same clipping; the bare loop gets its micro-batches ready-made. They take turns, and the
median over the rounds of the ratio of their median steps counts. Both run at the niceness that
Elastrata gives its workers. DATA_SET is prepared by
`elastrata prepare bert/wikitext-mini`.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from harness import parser_of, write_result
from processes import last_line, trained_steps

from elastrata.core.optimizer import build_optimizer
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import decode

STEPS, WARM_UP = 60, 10
NICENESS = "0"
"""The niceness of the workers of Elastrata."""


def overrides(data: str) -> list[str]:
    return [
        f"data.path={data}",
        f"steps={STEPS}",
        "schedule.warmup_steps=0",
        "workers.max=1",
        "workers.threads=1",
        "evaluation.every=100000",
        "checkpoint.every=100000",
    ]


def engine_seconds(data: str) -> float:
    """Median seconds from one step's end to the next, through `elastrata train`."""
    steps = trained_steps("bert/wikitext-mini", *overrides(data))
    times = [step["time"] for step in steps][WARM_UP:-1]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def bare_seconds(recipe: Recipe) -> float:
    """Median seconds of a step of a plain loop over the same micro-batches."""
    torch.set_num_threads(1)
    batches = training_data(recipe).train
    vocabulary, workload = batches.manifest.vocabulary, recipe.workload
    torch.manual_seed(recipe.seed)
    model = workload.build_model(vocabulary, batches.manifest.seq_len)
    optimizer = build_optimizer(recipe.optimizer, model, workload.blocks(model))
    ready = [
        [workload.collate(rows, vocabulary, recipe.seed) for rows in step.micro_batches]
        for group in batches.groups(
            Start(), steps=STEPS, batch_size=recipe.batch_size, max_tokens=2**20
        )
        for payload in batches.payloads(group, 1)
        for step in decode(payload, batches.manifest.token_dtype)
    ]
    seconds = []
    for micro_batches in ready:
        started = time.perf_counter()
        weight = sum(batch.weights["mlm"] for batch in micro_batches)
        for batch in micro_batches:
            (workload.loss(model, batch).terms["mlm"] / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:])


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("data_set")
    parser.add_argument("--bare", action="store_true", help="only print the bare loop's seconds")
    arguments = parser.parse_args()
    data = str(Path(arguments.data_set).resolve())
    if arguments.bare:
        print(bare_seconds(load_recipe("bert/wikitext-mini", overrides(data))))
        return
    rounds = []
    for _ in range(arguments.rounds):
        command = ["nice", "-n", NICENESS, sys.executable, __file__, data, "--bare"]
        bare_step, engine_step = last_line(command), engine_seconds(data)
        rounds.append(
            {
                "bare_steps_per_second": round(1 / bare_step, 3),
                "engine_steps_per_second": round(1 / engine_step, 3),
                "engine_over_bare": round(bare_step / engine_step, 4),
            }
        )
        print(rounds[-1])
    figures = {
        "engine_over_bare": statistics.median(r["engine_over_bare"] for r in rounds),
        "rounds": rounds,
    }
    write_result("engine", figures, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
