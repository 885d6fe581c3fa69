"""The engine's loop beside that of another version: seconds of a step, and whether losses agree.

    python benchmarks/engine_versions.py DATA_SET --beside CHECKOUT

CHECKOUT is a folder with another version, such as one that `git worktree add` made. Both train
BERT-mini on DATA_SET, which `elastrata prepare bert/wikitext-mini` made, in one process of one
thread, without Ray. They take turns; what counts is the median over the rounds of the ratio of
their median steps, by the processor's time, as the clock counts what others on the machine take.
Writes results/engine_versions.json.
"""

from __future__ import annotations

import inspect
import json
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import of_version, parser_of, write_result

STEPS, WARM_UP = 22, 5


def steps(data: str) -> dict[str, Any]:
    """Median seconds of a step of the version that this process imports, and losses."""
    # Imported here, as another version may have them elsewhere.
    from elastrata.core.control_signal import Action
    from elastrata.core.optimizer import build_optimizer
    from elastrata.recipe.file import load_recipe
    from elastrata.trainer.engine import divided_model, training_loop
    from elastrata.trainer.preflight import training_data
    from elastrata_pipelines.batches import Start
    from elastrata_pipelines.payload import decode

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    recipe = load_recipe(
        "bert/wikitext-mini",
        [
            f"data.path={data}",
            f"steps={STEPS}",
            "schedule.warmup_steps=0",
            "workers.max=1",
            "workers.threads=1",
        ],
    )
    batches = training_data(recipe).train
    vocabulary, seq_len = batches.manifest.vocabulary, batches.manifest.seq_len

    def stream() -> Iterator[Any]:
        size = {"batch_size": recipe.batch_size, "max_tokens": 2**20}
        for group in batches.groups(Start(), steps=STEPS, **size):
            for payload in batches.payloads(group, 1):
                yield from decode(payload, batches.manifest.token_dtype)

    with _lone_group()(cpu):
        divided = divided_model(recipe, vocabulary, seq_len, cpu, 1)
        blocks = recipe.workload.blocks(divided.model)
        optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
        known = inspect.signature(training_loop).parameters
        more = {"blocks": blocks} if "blocks" in known else {}
        loop = training_loop(recipe, divided.clip, vocabulary, cpu, 1, **more)
        clock, processor, losses = [], [], []
        run = loop.run(divided.forward_backward, optimizer, stream(), Start(), lambda: Action.GO_ON)
        for record, _ in run:
            clock.append(time.perf_counter())
            processor.append(time.process_time())
            losses.append(record.loss)
    return {"clock": _median(clock), "processor": _median(processor), "losses": losses}


def _lone_group() -> Any:
    try:
        from elastrata.core.mesh import lone_group
    except ImportError:
        from elastrata.core.lone_group import lone_group
    return lone_group


def _median(ended: list[float]) -> float:
    return statistics.median(later - earlier for earlier, later in pairwise(ended[WARM_UP:]))


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("data_set")
    parser.add_argument("--beside", type=Path, help="the checkout of another version")
    parser.add_argument("--only", action="store_true", help="print the steps of this version")
    arguments = parser.parse_args()
    data = str(Path(arguments.data_set).resolve())
    if arguments.only:
        print(json.dumps(steps(data)))
        return
    rounds, deviation = [], 0.0
    for _ in range(arguments.rounds):
        this, other = (
            of_version(checkout, data, "--only") for checkout in (None, arguments.beside.resolve())
        )
        pairs = zip(this.pop("losses"), other.pop("losses"), strict=True)
        deviation = max(deviation, *(abs(a - b) / abs(b) for a, b in pairs))
        rounds.append({"this": this, "other": other})
    ratios = {
        kind: statistics.median(pair["other"][kind] / pair["this"][kind] for pair in rounds)
        for kind in ("processor", "clock")
    }
    figures = {
        "speed_over_the_others": {kind: round(ratio, 4) for kind, ratio in ratios.items()},
        "max_relative_loss_difference": deviation,
        "rounds": rounds,
    }
    write_result("engine_versions", figures, ("torch",))


if __name__ == "__main__":
    main()
