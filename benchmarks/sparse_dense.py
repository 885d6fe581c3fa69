"""Sparse training followed by dense training: effect on the loss, and FLOPs.

    python benchmarks/sparse_dense.py ../shared/data/wikitext

Trains a Llama of half a million weights on WikiText and the sources of this Python's standard
library, once per seed and case, on equal tokens:

- dense: dense from the first step to the last.
- dense, two phases: dense, with the learning rates of the sparse cases, which have a warm-up in the
  last phase, too.
- static 50%, static 75%: this share of the matrices' weights is zero, chosen at random; then dense.
- rigl 75%: RigL moves the zeros; then dense.

All seeds have the same samples; weights, order and masks differ. The validation loss is that of
WikiText's validation text after the last step, and at the end of the sparse phase. FLOPs are
counted, not timed: unstructured zeros make no step faster, on a CPU or a GPU.

`--steps 40 --seeds 1 --tiny` tests the script; with `--scratch FOLDER` it resumes after an
interruption. Writes benchmarks/results/sparse_dense.json and sparse_dense.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    RESULTS,
    elastrata,
    parser_of,
    picture,
    prepare,
    scratch_folder,
    sources,
    write_result,
)

from elastrata.run import history
from elastrata.run.facts import flops_by_phase
from elastrata_pipelines.storage import Storage

DENSE, CONTROL = "dense", "dense, two phases"
CASES: dict[str, dict[str, Any] | None] = {
    DENSE: None,
    CONTROL: None,
    "static 50%": {"level": 0.5},
    "static 75%": {"level": 0.75},
    "rigl 75%": {"method": "rigl", "level": 0.75, "schedule": {"every": 20, "fraction": 0.3}},
}
COLORS = ("tab:gray", "black", "tab:blue", "tab:red", "tab:green")
SMALL = {"num_layers": 3, "hidden_size": 96, "num_heads": 4, "num_kv_heads": 2}
TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1}
VOCABULARY, BATCH_SIZE, EVALUATIONS, CURVE_POINTS = 2048, 4, 8, 60


@dataclass(frozen=True)
class Trained:
    """Results of one run."""

    losses: list[float]
    """Loss of every step."""
    evaluated: dict[int, float]
    """Validation losses by step."""
    flops: list[dict[str, int]]
    """FLOPs of every phase, without zeros (`dense`) and with them (`needed`)."""


def write_recipe(arguments: argparse.Namespace, folder: Path) -> Path:
    """Write the recipe that all runs vary, and prepare its data."""
    train, validation, library = sources(arguments.wikitext, folder / "python", "whole")
    values: dict[str, Any] = {
        "extends": "gpt/quick",
        "workload": TINY if arguments.tiny else SMALL,
        "batch_size": BATCH_SIZE,
        "data": {
            "path": str(folder / "data"),
            "prepare": {
                "sources": [train, library],
                "tokenizer": {"vocab_size": VOCABULARY},
                "held_out": [validation],
            },
        },
        "evaluation": {"every": max(1, arguments.steps // EVALUATIONS), "samples": 256},
        # No checkpoints during a run.
        "checkpoint": {"every": 10 * arguments.steps, "hot_steps": 0},
        "workers": {"min": arguments.workers, "max": arguments.workers, "spares": False},
        "storage": str(folder / "runs"),
    }
    recipe = folder / "recipe.yaml"
    prepare(recipe, values)
    return recipe


def phases(arguments: argparse.Namespace, sparsity: Mapping[str, Any] | None) -> str:
    """Return two phases as YAML, the second of them dense.

    Learning rates are the same with and without sparsity.
    """
    last = round(arguments.steps * arguments.dense_share)
    first = arguments.steps - last
    warm_up = {"shape": "cosine", "final": 0.1}
    parts = [
        {"steps": first, "schedule": {**warm_up, "warmup_steps": first // 10}},
        {"steps": last, "schedule": {**warm_up, "warmup_steps": last // 10}, "sparsity": None},
    ]
    parts[0]["sparsity"] = sparsity
    # JSON is valid YAML.
    return json.dumps(parts)


def train(arguments: argparse.Namespace, recipe: Path, case: str, seed: int) -> Trained:
    # Names of cases contain characters that names of runs may not have.
    name = f"{''.join(c if c.isalnum() else '-' for c in case)}-{seed}"
    overrides = [f"steps={arguments.steps}", f"seed={seed}", *arguments.overrides]
    if case == DENSE:
        warm_up = arguments.steps // 10
        overrides.append(f"schedule={{shape: cosine, final: 0.1, warmup_steps: {warm_up}}}")
    else:
        overrides.append(f"phases={phases(arguments, CASES[case])}")
    result = elastrata("train", str(recipe), *overrides, "--name", name)
    entries = history.read_entries(Storage(result["run_dir"]).sub("history"))
    steps = history.effective_steps(entries)
    dense = round(arguments.steps * arguments.dense_share)
    ends = [arguments.steps] if case == DENSE else [arguments.steps - dense, arguments.steps]
    return Trained(
        losses=[step["loss"] for step in steps],
        evaluated={e["step"]: e["eval/loss"] for e in entries if e["kind"] == "evaluated"},
        flops=[
            {"dense": phase.dense, "needed": phase.needed} for phase in flops_by_phase(steps, ends)
        ],
    )


def summary(runs: Sequence[Trained], dense: Sequence[Trained]) -> dict[str, Any]:
    """Return the figures of a case, compared with the dense runs of the same seeds."""
    final_losses = [list(run.evaluated.values())[-1] for run in runs]
    dense_losses = [list(run.evaluated.values())[-1] for run in dense]
    gaps = [one - other for one, other in zip(final_losses, dense_losses, strict=True)]
    total_flops = {kind: sum(part[kind] for part in runs[0].flops) for kind in ("dense", "needed")}
    phase_ends = sorted(runs[0].evaluated)
    return {
        "validation_loss": [round(loss, 4) for loss in final_losses],
        "mean_validation_loss": round(statistics.fmean(final_losses), 4),
        "above_dense": [round(gap, 4) for gap in gaps],
        "mean_above_dense": round(statistics.fmean(gaps), 4),
        "deviation_of_above_dense": round(statistics.stdev(gaps), 4) if len(gaps) > 1 else None,
        "flops_by_phase": runs[0].flops,
        "times_fewer_flops_by_phase": [
            round(part["dense"] / part["needed"], 3) for part in runs[0].flops
        ],
        "times_fewer_flops": round(total_flops["dense"] / total_flops["needed"], 3),
        "validation": {
            step: [round(run.evaluated[step], 4) for run in runs] for step in phase_ends
        },
        "training_loss": [
            [round(float(part.mean()), 4) for part in spans(run.losses)] for run in runs
        ],
    }


def spans(losses: Sequence[float]) -> list[Any]:
    """Return equal spans of steps."""
    return np.array_split(np.array(losses), min(CURVE_POINTS, len(losses)))


def draw(cases: Mapping[str, Sequence[Trained]], path: Path) -> None:
    """Draw validation losses over steps and over needed FLOPs, one line per seed."""
    figure = picture(10, 4.5)
    left, right = figure.subplots(1, 2, sharey=True)
    for (case, runs), color in zip(cases.items(), COLORS, strict=False):
        for number, run in enumerate(runs):
            steps, losses = zip(*sorted(run.evaluated.items()), strict=True)
            label = case if number == 0 else None
            left.plot(steps, losses, color=color, label=label, linewidth=1)
            right.plot(
                [_needed_flops(run, step) for step in steps], losses, color=color, linewidth=1
            )
    left.set_xlabel("optimizer step")
    left.set_ylabel("validation loss (nats)")
    right.set_xlabel("FLOPs needed so far")
    left.legend(frameon=False)
    figure.savefig(path)


def _needed_flops(run: Trained, step: int) -> float:
    """Return the FLOPs up to a step."""
    # Interpolated: all steps of a phase cost about the same.
    ends = np.cumsum([0, *(part["needed"] for part in run.flops)])
    total = len(run.losses)
    shares = np.cumsum([0, *(part["dense"] for part in run.flops)])
    return float(np.interp(step / total * shares[-1], shares, ends))


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all runs")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--dense-share", type=float, default=0.2, help="of the steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--scratch", type=Path, help="a folder that keeps data and runs")
    parser.add_argument("--cases", help="some, with ';' between")
    arguments = parser.parse_intermixed_args()
    cases = arguments.cases.split(";") if arguments.cases else list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"--cases: {'; '.join(sorted(unknown))}: expected some of {'; '.join(CASES)}")
    runs_by_case: dict[str, list[Trained]] = {case: [] for case in cases}
    with scratch_folder(arguments.scratch) as scratch:
        recipe = write_recipe(arguments, scratch)
        for seed in range(arguments.seeds):
            for case in cases:
                runs_by_case[case].append(train(arguments, recipe, case, seed))
                last = list(runs_by_case[case][-1].evaluated.values())[-1]
                print(f"{case}, seed {seed}: {last:.4f}", flush=True)
    name = "sparse_dense_tiny" if arguments.tiny else "sparse_dense"
    draw(runs_by_case, RESULTS / f"{name}.png")
    write_result(
        name,
        {
            "steps": arguments.steps,
            "dense_share": arguments.dense_share,
            "seeds": arguments.seeds,
            "flops": "forward and backward, attention causal-halved, without products with zeros",
            "cases": {
                case: summary(runs, runs_by_case[cases[0]]) for case, runs in runs_by_case.items()
            },
        },
        ("elastrata", "ray", "torch"),
    )


if __name__ == "__main__":
    main()
