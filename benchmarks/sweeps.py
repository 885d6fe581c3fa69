"""Cost and result of a sweep of BERT-tiny with ASHA, compared with the full grid.

    python benchmarks/sweeps.py ../shared/data/wikitext

Prepares WikiText once, trains all 16 points of a grid to their end, then 16 random points of the
same space with ASHA. Writes `results/sweeps.json`: the seconds that a trial takes in addition to
its training, the tokens that early stopping saves, and the difference of ASHA's best loss from that
of the grid.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from harness import parser_of, scratch_folder, wikitext_source, write_result

import elastrata
from elastrata.driver.ray_session import ray_session
from elastrata.run import history
from elastrata.sweeps.result import JOURNAL, SweepResult
from elastrata_pipelines.storage import Storage

# 4 x 2 x 2 points: a grid of 16.
SPACE: dict[str, Any] = {
    "optimizer.lr": {"loguniform": [3e-4, 1e-2], "points": 4},
    "optimizer.betas.1": {"uniform": [0.9, 0.999], "points": 2},
    "clip.max_norm": {"uniform": [0.3, 1.0], "points": 2},
}
TRIALS, LEAST_CHECKS = 16, 12
"""Number of trials, and of evaluations per trial, on which schedulers decide."""


def changes(wikitext: Path, scratch: Path, steps: int) -> dict[str, Any]:
    return {
        "data.path": str(scratch / "data"),
        "data.prepare.sources": [wikitext_source(wikitext, "train")],
        "data.prepare.held_out": [wikitext_source(wikitext, "validation")],
        "data.prepare.seq_len": 64,
        "data.prepare.tokenizer.vocab_size": 8192,
        "storage": str(scratch / "runs"),
        "steps": steps,
        "batch_size": 16,
        "schedule.warmup_steps": steps // 10,
        "evaluation.every": max(1, steps // LEAST_CHECKS),
        "evaluation.samples": 128,
        "checkpoint.every": steps,
    }


def seconds_over_training(result: SweepResult) -> list[float]:
    """Return the seconds from each trial's suggestion to its end, without steps and evaluations."""
    entries = history.read_entries(Storage(result.folder).sub(JOURNAL))
    begins = {e["trial"]: e["time"] for e in entries if e["kind"] == "suggested"}
    ends = {e["trial"]: e["time"] for e in entries if e["kind"] == "concluded"}
    trials = result.standings.trials
    return [ends[id] - begins[id] - trials[id].seconds for id in begins]


def figures(result: SweepResult, slots: int) -> dict[str, Any]:
    over = seconds_over_training(result)
    trials = result.standings.trials.values()
    return {
        "best": result.best_value,
        "best_values": result.best_values,
        "tokens": sum(trial.tokens for trial in trials),
        "states": result.summary()["trials"],
        "seconds": result.seconds,
        "seconds_training": sum(trial.seconds for trial in trials),
        # The first trial of each slot also starts its worker, so it counts separately.
        "seconds_over_training_first": over[:slots],
        "seconds_over_training_mean": mean(over[slots:]),
        "seconds_over_training_median": median(over[slots:]),
        "seconds_over_training_most": max(over[slots:]),
    }


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--only", choices=["asha"], help="Leave the grid out, to try things.")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--folder", type=Path, help="of the sweeps, kept; they go on in it.")
    arguments = parser.parse_args()
    with scratch_folder(arguments.folder) as folder, ray_session():
        common: dict[str, Any] = {
            "recipe": "bert/tiny",
            "changes": changes(arguments.wikitext, folder, arguments.steps),
            "space": SPACE,
            "concurrency": arguments.slots,
            "trials": arguments.trials,
        }
        asha = elastrata.sweep(
            elastrata.SweepConfig(name="asha", scheduler={"name": "asha"}, **common)
        )
        result: dict[str, Any] = {"space": SPACE, "asha": figures(asha, arguments.slots)}
        if arguments.only != "asha":
            grid = elastrata.sweep(
                elastrata.SweepConfig(name="grid", searcher={"name": "grid"}, **common)
            )
            result["grid"] = figures(grid, arguments.slots)
            assert asha.status == grid.status == "FINISHED"
            assert asha.best_value
            assert grid.best_value
            result["loss_over_that_of_the_grid"] = asha.best_value / grid.best_value - 1
        # A trial that ASHA did not stop.
        full_trial_tokens = max(trial.tokens for trial in asha.standings.trials.values())
        result["share_of_tokens_saved"] = 1 - result["asha"]["tokens"] / (
            arguments.trials * full_trial_tokens
        )
    write_result("sweeps", result, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
