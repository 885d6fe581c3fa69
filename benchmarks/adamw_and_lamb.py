"""AdamW and LAMB across batch sizes, both tuned with the same budget, on WikiText.

    python benchmarks/adamw_and_lamb.py ../shared/data/wikitext

The question of *Breaking MLPerf Training: optimizing BERT* (arXiv 2402.02447) on a small scale. For
every batch size both optimizers get a sweep of BERT-tiny with the same space, the same number of
points, the same samples per trial and the same early stopping. Writes
`results/adamw_and_lamb.json` and `.png`: held-out loss of the best trial of each, and its values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, parser_of, picture, write_result
from sweeps import changes

import elastrata
from elastrata.cluster.ray_session import ray_session
from elastrata.sweeps.result import SweepResult

OPTIMIZERS = {"adamw": "#1769aa", "lamb": "#d1495b"}
EVALUATIONS = 8


def study(
    base: dict[str, Any], optimizer: str, batch_size: int, steps: int, trials: int
) -> SweepResult:
    config = elastrata.SweepConfig(
        name=f"{optimizer}-{batch_size}",
        recipe="bert/tiny",
        changes={
            **base,
            "optimizer.name": optimizer,
            "batch_size": batch_size,
            "steps": steps,
            "schedule.warmup_steps": steps // 10,
            "evaluation.every": max(1, steps // EVALUATIONS),
            "checkpoint.every": steps,
        },
        space={
            "optimizer.lr": {"loguniform": [1e-3, 1e-1]},
            "optimizer.betas.1": {"uniform": [0.9, 0.999]},
            "schedule.warmup_steps": {"int": [0, steps // 2]},
        },
        scheduler={"name": "asha", "reduction_factor": 2},
        trials=trials,
    )
    result = elastrata.sweep(config)
    if result.status != "FINISHED":
        raise SystemExit(f"{result.folder}: interrupted")
    return result


def row(result: SweepResult, optimizer: str, batch_size: int, steps: int) -> dict[str, Any]:
    trials = result.standings.trials.values()
    return {
        "optimizer": optimizer,
        "batch_size": batch_size,
        "steps": steps,
        "eval_loss": result.best_value,
        "eval_loss_second": sorted(t.value("eval/loss") for t in trials if t.counts)[1],
        "values": result.best_values,
        "tokens_of_the_search": sum(trial.tokens for trial in trials),
        "states": result.summary()["trials"],
        "seconds": result.seconds,
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The best held-out loss of each optimizer by batch size."""
    figure = picture(6, 4)
    axes = figure.add_subplot()
    for optimizer, color in OPTIMIZERS.items():
        own = [row for row in rows if row["optimizer"] == optimizer]
        sizes = [row["batch_size"] for row in own]
        axes.plot(sizes, [row["eval_loss"] for row in own], "o-", color=color, label=optimizer)
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{row['batch_size']}\n{row['steps']} steps" for row in own])
    axes.minorticks_off()
    axes.set_xlabel("batch size, equal samples")
    axes.set_ylabel("best held-out loss (nats)")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--samples", type=int, default=16_384, help="of a trial")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--trials", type=int, default=8, help="of each optimizer and batch size")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, ray_session():
        base = changes(arguments.wikitext, Path(folder), steps=1)
        for batch_size in arguments.batches:
            steps = arguments.samples // batch_size
            for optimizer in OPTIMIZERS:
                result = study(base, optimizer, batch_size, steps, arguments.trials)
                rows.append(row(result, optimizer, batch_size, steps))
    draw(rows, RESULTS / "adamw_and_lamb.png")
    write_result("adamw_and_lamb", {"rows": rows}, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
