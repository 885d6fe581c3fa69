"""Accuracy of ModernBERT-mini compared with BERT-mini on masked tokens, at equal tokens.

    python benchmarks/encoders.py ../shared/data/wikitext --scratch encoders --seeds 3

Both train on WikiText's paragraphs and on functions and classes of this Python's standard library,
up to 512 tokens with one BPE vocabulary of 8,192, in the same order. Batches, optimizer, schedule
and the share of masked tokens (ModernBERT's 30%) are the same, and the feed-forwards have equally
many weights. So only the architecture differs, and BERT's position table. They are evaluated on
held-out parts of both texts. Runs in one process with one thread.

Finished runs in the scratch folder are not repeated: the same command resumes after an
interruption. Writes results/encoders.json and encoders.png for the seeds that are complete.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import (
    RESULTS,
    VOCABULARY,
    natural_length_sources,
    parser_of,
    picture,
    prepare,
    trained_alone,
    write_result,
)

from elastrata.recipe.file import load_recipe
from elastrata.run import history
from elastrata.workload.workload import matmul_parameters
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage

MODELS = ("bert/mini", "modernbert/mini")
STEPS, EVERY, SAMPLES, SEQ_LEN = 240, 40, 256, 512
ACCURACY = "eval/mlm_accuracy"


def prepare_text(wikitext: Path, scratch: Path) -> None:
    """Prepare one data set for both models if it is missing."""
    text = {
        "sources": natural_length_sources(wikitext),
        "tokenizer": {"train": "bpe", "vocab_size": VOCABULARY},
        "seq_len": SEQ_LEN,
        "packing": "none",
        "held_out": 0.05,
    }
    values = {"extends": MODELS[1], "data": {"path": str(scratch / "data"), "prepare": text}}
    prepare(scratch / "text.yaml", values)


def changes(seed: int, scratch: Path) -> list[str]:
    """Return the overrides that runs of both models share."""
    evaluation = {"path": str(scratch / "data" / "held_out"), "every": EVERY, "samples": SAMPLES}
    return [
        f"data={json.dumps({'path': str(scratch / 'data')})}",
        # The recipe's length is in tokens, this one in steps.
        "tokens=null",
        f"steps={STEPS}",
        "batch_size=32",
        f"seed={seed}",
        "workload.mask_probability=0.3",
        f"workload.max_positions={SEQ_LEN}",
        "optimizer.lr=1e-3",
        "optimizer.weight_decay=0.01",
        "schedule={shape: linear, warmup_ratio: 0.05}",
        f"evaluation={json.dumps(evaluation)}",
    ]


def curve(run: Path) -> dict[str, list[float]]:
    """Return the tokens seen at every evaluation, and its accuracy."""
    entries = history.read_entries(Storage(str(run)).sub("history"))
    tokens = {entry["step"]: entry["tokens"] for entry in history.effective_steps(entries)}
    evaluations = list(history.surviving_evaluations(entries))
    return {
        "tokens": [int(tokens[entry["step"]]) for entry in evaluations],
        "accuracy": [round(float(entry[ACCURACY]), 5) for entry in evaluations],
    }


def measure(seed: int, scratch: Path) -> dict[str, Any]:
    curves = {}
    for model in MODELS:
        recipe = load_recipe(model, changes(seed, scratch))
        run = scratch / "runs" / f"{recipe.workload.name}-{seed}"
        curves[model] = curve(trained_alone(recipe, run))
    return {"seed": seed, **curves}


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the final accuracies, and their differences by seed."""
    last = {model: [seed[model]["accuracy"][-1] for seed in seeds] for model in MODELS}
    bert, modern = last.values()
    return {
        "tokens": seeds[0][MODELS[0]]["tokens"][-1],
        "accuracy": {
            model: round(statistics.mean(accuracies), 4) for model, accuracies in last.items()
        },
        "differences": [round(one - other, 5) for one, other in zip(modern, bert, strict=True)],
    }


def draw(seeds: Sequence[dict[str, Any]], path: Path) -> None:
    figure = picture(6, 3)
    axes = figure.subplots()
    for model, color in zip(MODELS, ("gray", "tab:blue"), strict=True):
        for seed in seeds:
            label = model if seed is seeds[0] else None
            tokens, accuracy = seed[model].values()
            millions = [number / 1e6 for number in tokens]
            axes.plot(millions, accuracy, color=color, lw=1, label=label)
    axes.set(xlabel="million tokens", ylabel="accuracy of masked tokens, held out")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--scratch", type=Path, required=True, help="keeps data and runs")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    scratch: Path = arguments.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    prepare_text(arguments.wikitext, scratch)
    vocabulary = Manifest.read(Storage(str(scratch / "data"))).vocabulary
    multiplied = {
        model: matmul_parameters(load_recipe(model, changes(0, scratch)).workload, vocabulary)
        for model in MODELS
    }
    seeds: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        seeds.append(measure(seed, scratch))
        figures = {"steps": STEPS, "matrix_parameters": multiplied, **summary(seeds)}
        write_result("encoders", {**figures, "seeds": seeds}, ("elastrata", "torch"))
        draw(seeds, RESULTS / "encoders.png")


if __name__ == "__main__":
    main()
