"""The overhead of the engine: steps/s of `elastrata train` compared with a bare PyTorch loop.

    python benchmarks/engine.py DATA_SET

All train BERT-mini on the same micro-batches of the same steps with one thread, the same AdamW and
the same clipping; the bare loop's micro-batches are collated in advance. `loop` is the engine's own
loop on its sharded model, without the other processes of a run, which need a core for themselves.
The variants take turns; the figures are medians over the rounds of the ratios of their median
steps. All run at the niceness of Elastrata's workers. `elastrata prepare bert/wikitext-mini`
prepares DATA_SET.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from harness import last_line, parser_of, trained_steps, write_result

from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import lone_group
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.build_model import build_divided_model
from elastrata.trainer.preflight import find_training_data
from elastrata.trainer.trainer import build_loop
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep, decode

STEPS, WARM_UP = 60, 10
NICENESS = "0"
"""Niceness of Elastrata's workers."""


def overrides(data: str) -> list[str]:
    return [
        f"data.path={data}",
        f"steps={STEPS}",
        "schedule.warmup_steps=0",
        "workers.max=1",
        "workers.threads=1",
        # Neither evaluations nor checkpoints within the run: the bare loop has none.
        "evaluation.every=100000",
        "checkpoint.every=100000",
    ]


def engine_seconds(data: str) -> float:
    """Return the median seconds between the ends of steps of `elastrata train`."""
    steps = trained_steps("bert/wikitext-mini", *overrides(data))
    times = [step["time"] for step in steps][WARM_UP:-1]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def bare_seconds(recipe: Recipe) -> float:
    """Return the median seconds of a step of a plain loop over the same micro-batches."""
    torch.set_num_threads(1)
    batches = find_training_data(recipe).train
    vocabulary, workload = batches.manifest.vocabulary, recipe.workload
    torch.manual_seed(recipe.seed)
    model = workload.build_model(vocabulary, batches.manifest.seq_len)
    optimizer = build_optimizer(recipe.optimizer, model, workload.blocks(model))
    # Collated in advance: the bare loop has no data pipeline.
    collated_steps = [
        [workload.collate(rows, vocabulary, recipe.seed) for rows in step.micro_batches]
        for step in stream(recipe)
    ]
    seconds = []
    for micro_batches in collated_steps:
        started = time.perf_counter()
        weight = sum(batch.weights["mlm"] for batch in micro_batches)
        for batch in micro_batches:
            (workload.loss(model, batch).terms["mlm"] / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:])


def loop_seconds(recipe: Recipe) -> float:
    """Return the median seconds of a step of the engine's loop, without Ray."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    data = find_training_data(recipe).train
    vocabulary, seq_len = data.manifest.vocabulary, data.manifest.seq_len
    with lone_group(cpu):
        divided = build_divided_model(recipe, vocabulary, seq_len, cpu, 1)
        blocks = recipe.workload.blocks(divided.model)
        optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
        loop = build_loop(recipe, divided.clip, vocabulary, cpu, 1, blocks=blocks)
        run = loop.run(divided.forward_backward, optimizer, stream(recipe), Start())
        end_times = [time.perf_counter() for _ in run][WARM_UP:]
    return statistics.median(later - earlier for earlier, later in pairwise(end_times))


def stream(recipe: Recipe) -> Iterator[RankStep]:
    """Yield the steps of a single rank."""
    data = find_training_data(recipe).train
    groups = data.groups(Start(), steps=STEPS, batch_size=recipe.batch_size, max_tokens=2**20)
    for group in groups:
        for payload in data.payloads(group, 1):
            yield from decode(payload, data.manifest.token_dtype)


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("data_set")
    alone = {"bare": bare_seconds, "loop": loop_seconds}
    parser.add_argument("--only", choices=alone, help="print the seconds of that one")
    arguments = parser.parse_args()
    data = str(Path(arguments.data_set).resolve())
    if arguments.only:
        print(alone[arguments.only](load_recipe("bert/wikitext-mini", overrides(data))))
        return
    rounds = []
    for _ in range(arguments.rounds):
        command = ["nice", "-n", NICENESS, sys.executable, __file__, data, "--only"]
        # In new processes, so that no variant inherits the threads or memory of another.
        seconds = {name: last_line([*command, name]) for name in alone}
        seconds["engine"] = engine_seconds(data)
        bare_step = seconds["bare"]
        rounds.append(
            {
                **{f"{name}_steps_per_second": round(1 / s, 3) for name, s in seconds.items()},
                "loop_over_bare": round(bare_step / seconds["loop"], 4),
                "engine_over_bare": round(bare_step / seconds["engine"], 4),
            }
        )
        print(rounds[-1], flush=True)
    figures = {
        **{
            name: statistics.median(r[name] for r in rounds)
            for name in ("loop_over_bare", "engine_over_bare")
        },
        "rounds": rounds,
    }
    write_result("engine", figures, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
