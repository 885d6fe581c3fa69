"""A real run under faults, beside the same faults simulated: goodput, steps, and where they differ.

    PYTHONPATH=tests python benchmarks/goodput.py [--cycles N] [--steps-between N]

Trains a small model on a Ray cluster of several nodes on this machine, on two workers at first. A
node is killed, one is added, a worker is killed, a node is drained, one is added, a worker is
killed, and so on, each when the run has done so many more steps. Then what happened is given to
the simulation: the times of the faults, and what a step takes at each number of workers (the
median of this run). Recovery takes what results/faults.json says, and, beside it, what it took in
this very run: the first compares all of the simulation, the second its logic alone.

Goodput is the share of the time that the steps which count take at the median pace of their number
of workers, from the first group's start to the last step. Writes results/goodput.json.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import RESULTS, parser_of, write_result

from elastrata.recipe.file import load_recipe
from elastrata.run.history import effective_steps
from elastrata.simulation.simulate import RecoverySeconds, Run, conditions, read_recovery
from elastrata.simulation.trace import Event, Kind
from support.command import kill_started
from support.live_run import LiveRun
from support.nodes import Nodes, nodes, send, train_workers
from support.short_steps import CPUS, write_recipe

STEPS = 100_000
PARAMETERS = 40_000
"""The size of the model, about: so few that copies of its state take no time."""
Injected = list[tuple[Kind, float]]
"""The faults, and when: Unix times."""
FIELDS = {"lose": "lost", "drain": "drained", "join": "joined", "kill": "killed"}
FAULTS: tuple[tuple[Kind, int], ...] = (
    ("lose", 1),
    ("join", 2),
    ("kill", 2),
    ("drain", 1),
    ("join", 2),
    ("kill", 2),
)
"""Each with the number of workers from then on."""


def disturbed(folder: Path, cycles: int, steps_between: int) -> tuple[Path, list[Any], Injected]:
    """The recipe's file, the run's history, and what was done to it."""
    recipe = write_recipe(folder, steps=STEPS)
    injected: Injected = []
    with nodes() as cluster:
        alive = [cluster.add(cpus=CPUS) for _ in range(2)]
        live = LiveRun(recipe, "run", folder / "log", "--address", cluster.address)
        live.wait_for_size(2, 1, steps_between)
        for kind, size in FAULTS * cycles:
            groups = live.groups() + 1
            injected.append((kind, time.time()))
            _inject(kind, cluster, alive)
            print(f"{kind}, {size} from then on", flush=True)
            live.wait_for_size(size, groups, steps_between)
        live.send(signal.SIGINT)
        live.driver.wait(timeout=120)
        return recipe, live.entries(), injected


def _inject(kind: str, cluster: Nodes, alive: list[Any]) -> None:
    if kind == "lose":
        cluster.kill(alive.pop())
    elif kind == "drain":
        cluster.drain(alive.pop(), seconds=120)
    elif kind == "join":
        alive.append(cluster.add(cpus=CPUS))
    else:
        send(train_workers(cluster.address)[-1], signal.SIGKILL)


def paces(steps: list[Any]) -> dict[int, float]:
    """Median seconds from step to step of a group, by its number of workers."""
    found: dict[int, list[float]] = {}
    for before, after in pairwise(steps):
        if before["attempt"] == after["attempt"]:
            found.setdefault(after["world_size"], []).append(after["time"] - before["time"])
    return {size: statistics.median(values) for size, values in found.items()}


def own_recovery(injected: Injected, entries: list[Any]) -> RecoverySeconds:
    """The seconds it took in this run, from each fault to the next group's first step."""
    seconds: dict[str, list[float]] = {}
    for kind, begun in injected:
        started = next(e for e in entries if e["kind"] == "started" and e["time"] > begun)
        first = next(
            e for e in entries if e["kind"] == "step" and e["attempt"] == started["attempt"]
        )
        seconds.setdefault(FIELDS[kind], []).append(first["time"] - begun)
    medians = {field: statistics.median(values) for field, values in seconds.items()}
    return replace(RecoverySeconds(), **medians)


def simulated(
    recipe: Path,
    injected: Injected,
    begun: float,
    seconds: float,
    pace: dict[int, float],
    recovery: RecoverySeconds,
) -> dict[str, float]:
    """The run's faults in simulated time, which starts a group before it can lose one: this much
    earlier than the real one's history begins."""
    before = recovery.joined
    faults = [Event(at - begun + before, kind) for kind, at in injected]
    events = [Event(0.0, "join", 2), *faults]
    loaded = load_recipe(str(recipe))
    at = conditions(
        loaded,
        lambda workers: pace.get(sum(workers), pace[max(pace)]),
        recovery,
        parameters=PARAMETERS,
        workers=(max(size for _, size in FAULTS),),
        group=1,
    )
    outcome = Run(at).replay(events, before + seconds)
    return {
        "goodput": round(outcome.useful_seconds / seconds, 3),
        "steps": outcome.steps,
        "steps_done_again": outcome.lost_steps,
        "seconds_without_steps": round(outcome.seconds_recovering - before, 1),
        **{f"recovery_{field}": round(vars(recovery)[field], 2) for field in FIELDS.values()},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cycles", type=int, default=2, help="of six faults each")
    parser.add_argument("--steps-between", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            recipe, entries, injected = disturbed(
                Path(folder), arguments.cycles, arguments.steps_between
            )
        finally:
            kill_started()
        steps = effective_steps(entries)
        entries.sort(key=lambda entry: float(entry["time"]))
        begun = next(entry["time"] for entry in entries if entry["kind"] == "started")
        seconds, pace = steps[-1]["time"] - begun, paces(steps)
        useful = sum(pace[step["world_size"]] for step in steps)
        all_steps = sum(entry["kind"] == "step" for entry in entries)
        table = read_recovery(str(RESULTS / "faults.json"))
        own = own_recovery(injected, entries)
        there = (recipe, injected, begun, seconds, pace)
        figures = {
            "faults": [[kind, round(at - begun, 1)] for kind, at in injected],
            "seconds": round(seconds, 1),
            "seconds_a_step_by_workers": {n: round(one, 4) for n, one in pace.items()},
            "run": {
                "goodput": round(useful / seconds, 3),
                "steps": len(steps),
                "steps_done_again": all_steps - len(steps),
            },
            "simulated, recovery of results/faults.json": simulated(*there, table),
            "simulated, recovery of this run": simulated(*there, own),
        }
    write_result("goodput", figures, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
