"""Time from `elastrata train` to the first step, by phase.

    python benchmarks/startup.py DATA_SET

Every round is a new process that trains `bert/wikitext-mini` for one step, with one worker and with
two; the figures are medians over the rounds. `elastrata prepare` prepares DATA_SET.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import last_line, medians, parser_of, write_result

PHASES = {
    "imports": "Python, torch and the recipe, in the driver",
    "preflight": "data set and recipe checked",
    "ray": "a local Ray cluster starts",
    "record": "MLflow's database and run",
    "workers": "Ray Train's controller and the workers: processes, imports, process group",
    "shard": "Ray Train's data manager hands out the stream",
    "model": "model, sharding, optimizer; the stream opens meanwhile",
    "data": "what is left of waiting for the stream's first payload",
    "state": "checkpoint, if there is one",
    "held_out": "held-out data",
    "first_step": "until the record of the first step has reached the driver",
}


def one_start(data: str, workers: int) -> dict[str, float]:
    """Return the seconds of one start in this process, by phase."""
    born = time.perf_counter()
    # Imported here, as imports are one of the phases.
    from elastrata.driver.launch import train
    from elastrata.recipe.file import load_recipe
    from elastrata.step.events import Event, Launched, Started
    from elastrata.step.records import StepRecord

    marks: dict[str, float] = {}
    seconds: dict[str, float] = {}

    def show(event: Event) -> None:
        marks[type(event).__name__] = time.perf_counter()
        if isinstance(event, Launched | Started):
            seconds.update(event.seconds)
        if isinstance(event, StepRecord):
            seconds["first_step"] = marks["StepRecord"] - marks["Started"]

    with tempfile.TemporaryDirectory() as storage:
        recipe = load_recipe(
            "bert/wikitext-mini",
            [
                f"data.path={data}",
                f"storage={storage}",
                "steps=1",
                "schedule.warmup_steps=0",
                f"workers.min={workers}",
                f"workers.max={workers}",
                "workers.threads=1",
            ],
        )
        seconds["imports"] = time.perf_counter() - born
        train(recipe, name="startup", show=show)
    in_worker = sum(
        seconds.get(name, 0) for name in ("shard", "model", "data", "state", "held_out")
    )
    # Not reported by the engine: the rest between two events.
    seconds["workers"] = marks["Started"] - marks["Launched"] - in_worker
    seconds["total"] = marks["StepRecord"] - born
    return seconds


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("data_set")
    parser.add_argument("--workers", type=int, help="only print one start with that many workers")
    arguments = parser.parse_args()
    data = str(Path(arguments.data_set).resolve())
    if arguments.workers:
        print(json.dumps(one_start(data, arguments.workers)))
        return
    figures: dict[str, Any] = {"phases": PHASES}
    for workers in (1, 2):
        command = [sys.executable, __file__, data, "--workers", str(workers)]
        starts = [last_line(command) for _ in range(arguments.rounds)]
        rounds = [{name: one.get(name, 0.0) for name in (*PHASES, "total")} for one in starts]
        figures[f"seconds_with_{workers}_workers"] = medians(rounds, 2)
        figures[f"totals_with_{workers}_workers"] = [round(r["total"], 1) for r in rounds]
    write_result("startup", figures, ("elastrata", "ray", "torch", "mlflow"))


if __name__ == "__main__":
    main()
