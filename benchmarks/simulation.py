"""Runs on machines that come and go, simulated: how fast, how right, and the best interval.

    python benchmarks/simulation.py

scale: 10,000 workers over 30 days, each lost every 100 hours on average and replaced after one,
with the engine's deal at every number of workers that occurs. intervals: the best number of steps
between durable checkpoints without hot copies, beside Young's and Daly's formulas. record: the
faults of the disturbed run in results/elasticity_plain.json, replayed; that has no time of its last
step, so what can be compared is how many steps were done again and the numbers of workers. chaos:
the same for results/chaos.json, at several paces. Writes results/simulation.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from harness import RESULTS, parser_of, write_result

from elastrata.recipe.file import load_recipe
from elastrata.simulation.simulate import (
    Conditions,
    Pace,
    RecoverySeconds,
    Run,
    Sizes,
    conditions,
    read_recovery,
    simulate,
    step_seconds,
    sweep,
)
from elastrata.simulation.trace import Event, Rates, drawn_events

DAY = 86_400.0
SEEDS = range(20)
PACES = (0.03, 0.06, 0.12)
"""Seconds of a step."""


def scale() -> dict[str, Any]:
    workers = 10_000
    recipe = load_recipe("gpt/13b", [f"batch_size={2 * workers}", "steps=10_000_000"])
    rates = Rates(lost_per_hour=0.01, hours_away=1.0)
    began = time.perf_counter()
    pace = Pace(steps_per_second=(0.1 / workers,), fixed_seconds=0.5)
    at = conditions(
        recipe,
        step_seconds(recipe, pace, group=8),
        RecoverySeconds(),
        parameters=13_000_000_000,
        workers=(workers,),
        group=8,
    )
    events = 0

    def counted() -> Iterable[Event]:
        nonlocal events
        for event in drawn_events((workers,), rates, seconds=30 * DAY, seed=0):
            events += 1
            yield event

    found = simulate(at, counted, seconds=30 * DAY, prices=None).outcome
    return {
        "workers": workers,
        "days": 30,
        "events": events,
        "seconds_of_simulation": round(time.perf_counter() - began, 2),
        "steps": found.steps,
        "goodput": round(found.goodput, 4),
        "faults": found.faults,
    }


def intervals() -> dict[str, Any]:
    at = Conditions(
        steps=10**9,
        step_seconds=lambda workers: 1.0,
        workers_min=1,
        workers_max=(64,),
        checkpoint_every=1,
        checkpoint_seconds=10.0,
        save_seconds=0.0,
        hot_every=0,
        hot_seconds=0.0,
        hot_save_seconds=0.0,
        resize_seconds=60.0,
        recovery=RecoverySeconds(),
    )
    rates = Rates(lost_per_hour=1 / 64, hours_away=0.0)

    def events() -> Iterable[Event]:
        return drawn_events((64,), rates, seconds=90 * DAY, seed=0)

    found = sweep(at, events, seconds=90 * DAY)
    assert found is not None
    return {
        "checkpoint_seconds": at.checkpoint_seconds,
        "seconds_between_faults": round(found.seconds_between_faults, 1),
        "best": found.best,
        "young": found.young,
        "daly": found.daly,
        "goodput": {key: round(value, 5) for key, value in found.goodput.items()},
    }


def short_steps(
    steps: int,
    step_seconds: Callable[[Sizes], float],
    *,
    workers_max: Sizes,
    recovery: RecoverySeconds,
) -> Conditions:
    """A run of short steps, as the faults are measured on: it seldom saves, and copies often."""
    return Conditions(
        steps=steps,
        step_seconds=step_seconds,
        workers_min=1,
        workers_max=workers_max,
        checkpoint_every=200,
        checkpoint_seconds=0.0,
        save_seconds=0.0,
        hot_every=5,
        hot_seconds=0.0,
        hot_save_seconds=0.2,
        resize_seconds=1.0,
        recovery=recovery,
    )


def record() -> dict[str, Any]:
    """The disturbed run of `elasticity.py`: hot copies every 5 steps, up to two workers there."""
    run = json.loads((RESULTS / "elasticity_plain.json").read_text(encoding="utf-8"))
    disturbed = run["through faults"]
    seconds = run["median_step_seconds"]
    recovery = read_recovery(str(RESULTS / "faults.json"))
    table = json.loads((RESULTS / "faults.json").read_text(encoding="utf-8"))["kinds"]
    hung = table["worker hung (SIGSTOP), 10 s allowed"]["next_step_after_s"]["median"]
    at = short_steps(
        run["steps"],
        lambda workers: seconds[f"{workers[0]} worker{'s' * (workers[0] > 1)}"],
        workers_max=(2,),
        recovery=replace(recovery, lost=max(recovery.lost, hung)),
    )
    lost = []
    for seed in SEEDS:
        # Where in a step a fault falls is not in the record: it is moved by up to a few steps.
        shift = 3.0 * seed / len(SEEDS)
        events = [Event(0.0, "join", 2)]
        for fault in disturbed["faults"]:
            kind, at_second = fault["kind"], fault.get("seconds", 0.0) + shift
            if kind in ("kill worker", "hang worker"):
                # The process is gone; its machine is not, and another takes its place at once.
                events += [Event(at_second, "lose"), Event(at_second + 0.001, "join")]
            elif kind == "kill node":
                events.append(Event(at_second, "lose"))
            elif kind == "add node":
                events.append(Event(at_second, "join"))
        found = Run(at).replay(sorted(events), DAY)
        lost.append(found.lost_steps / max(1, found.faults.get("lose", 0)))
    again = disturbed["steps_done_again"]
    return {
        "faults": [fault["kind"] for fault in disturbed["faults"]],
        "steps_again_for_each_rollback_recorded": round(statistics.mean(again), 2),
        "steps_again_for_each_rollback_simulated": round(statistics.mean(lost), 2),
    }


def chaos() -> dict[str, Any]:
    """The run of `chaos.py`, whose record does not tell what a step took: at several paces."""
    run = json.loads((RESULTS / "chaos.json").read_text(encoding="utf-8"))
    recovery = read_recovery(str(RESULTS / "faults.json"))
    found = {}
    for pace in PACES:
        at = short_steps(
            run["steps"], lambda workers, pace=pace: pace, workers_max=(3,), recovery=recovery
        )
        outcome = Run(at).replay(_chaos_events(run["faults"]), DAY)
        found[f"{pace:g} s a step"] = {
            "seconds": round(outcome.seconds, 1),
            "goodput": round(outcome.goodput, 3),
            "steps_done_again": outcome.lost_steps,
            "sizes": [size for _, size in outcome.sizes],
        }
    recorded = {
        "seconds": run["seconds"],
        "steps_done_again": sum(run["rolled_back"]),
        "sizes": run["world_sizes"],
    }
    return {"recorded": recorded, "simulated": found}


def _chaos_events(faults: list[dict[str, Any]]) -> list[Event]:
    """A process that dies, or hangs, leaves its machine: another takes its place at once. Another
    node comes before the last one goes."""
    events, there = [Event(0.0, "join", 2)], 2
    for fault in faults:
        kind, second = fault["kind"], fault["seconds"]
        if kind in ("kill worker", "hang worker"):
            events += [Event(second, "lose"), Event(second + 0.001, "join")]
        elif kind == "add node":
            events.append(Event(second, "join"))
            there += 1
        else:
            if there == 1:
                events.append(Event(second - 0.001, "join"))
                there += 1
            events.append(Event(second, "drain" if kind == "drain node" else "lose"))
            there -= 1
    return sorted(events)


def main() -> None:
    parser_of(__doc__).parse_args()
    figures = {
        "scale": scale(),
        "intervals": intervals(),
        "record": record(),
        "chaos": chaos(),
    }
    write_result("simulation", figures, ("numpy",))


if __name__ == "__main__":
    main()
