"""How soon a run grows on a cluster whose nodes Ray's autoscaler starts, and what it costs.

    PYTHONPATH=tests python benchmarks/autoscaling.py

A run of very short steps starts on one node of `cluster_configs/raylets.yaml`, whose nodes share
this machine, and asks for more workers than there can ever be. Growth begins when the group of
workers has saved its state and halted; its seconds are counted from the start of the node that the
first added worker needed. Then a node is drained, as by a spot machine's notice, Ray starts another
one in its place, and the run is ended. The samples of every step are held against those that the
data set says it has.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import parser_of, write_result

from support.autoscaled import (
    MOST_NODES,
    SETTINGS,
    STEPS,
    Growth,
    autoscaled,
    grown,
    interrupt,
    make_way,
    world_sizes,
)
from support.command import run_json
from support.live_run import LiveRun
from support.short_steps import write_recipe

PATIENCE_SECONDS = 500.0


def disturbed(recipe: Path, name: str) -> tuple[LiveRun, list[Growth]]:
    """A run that grows to what there can be, and loses a node; how it has grown."""
    with autoscaled() as cluster:
        where = ("--address", cluster.gcs_address)
        live = LiveRun(recipe, name, recipe.parent / f"log-{name}", *where, *SETTINGS)
        live.wait_for_size(MOST_NODES, number=2, steps=20, seconds=PATIENCE_SECONDS)
        growths = grown(live, cluster)
        make_way(live, cluster)
        interrupt(live)
    return live, growths


def main() -> None:
    arguments = parser_of(__doc__, rounds=5).parse_args()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), steps=STEPS)
        for number in range(arguments.rounds):
            name = f"round-{number}"
            live, growths = disturbed(recipe, name)
            proved = run_json("audit", recipe.parent / "runs" / name)
            rounds.append(
                {
                    "world_sizes": world_sizes(live),
                    "growths": [asdict(growth) for growth in growths],
                    "steps": len(live.steps()),
                    "steps_lost": sum(live.rolled_back()),
                    "samples_as_undisturbed": proved["partition_ok"],
                }
            )
            print(rounds[-1], flush=True)
    seconds = [growth["seconds"] for one in rounds for growth in one["growths"]]
    figures = {
        "seconds_until_growth_begins": {
            "median": round(statistics.median(seconds), 1),
            "longest": round(max(seconds), 1),
        },
        "rounds": rounds,
    }
    write_result("autoscaling", figures, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
