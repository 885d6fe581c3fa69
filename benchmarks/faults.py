"""Time to resume after each kind of fault, and the steps lost.

    PYTHONPATH=tests python benchmarks/faults.py

Trains a small model with two workers on a Ray cluster of several nodes on this machine and injects
the same fault several times: a worker is killed or stopped; a node is killed, drained or added; the
driver is interrupted or killed, and restarted. Times come from the run's history, from the
injection to the entry that reports the event, and to the next step. Every run's digests are
compared with those of an undisturbed run. With --anew all workers restart (`workers.stay: false`),
and the results are stored separately. The picture has a bar for each kind of fault that stops
workers: the phases of the trial with the median time to the next step.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RESULTS, known_result, parser_of, picture, write_result

from support.live_run import LiveRun
from support.nodes import Nodes, actors, nodes, send, train_workers
from support.short_steps import CPUS, write_recipe

# By then its spare workers have finished their imports.
SETTLED_STEPS = 60
SETTLED_SECONDS = 12.0
"""Steps and seconds after which a group has settled."""
# More than the trials need: the script interrupts the run after the last one.
STEPS = 12_000
COMPARED_STEPS = 600
"""Number of steps of the undisturbed run."""
Injection = Callable[[Nodes, LiveRun, list[Any]], None]
Trials = tuple[list[dict[str, Any]], list[Any]]
"""A row for each trial, and the steps that produced the final model."""


def kill_worker(cluster: Nodes, live: LiveRun, alive: list[Any]) -> None:
    send(train_workers(cluster.address)[-1], signal.SIGKILL)


def stop_worker(cluster: Nodes, live: LiveRun, alive: list[Any]) -> None:
    # A stopped process keeps its connections open, as a hanging one does.
    send(train_workers(cluster.address)[-1], signal.SIGSTOP)


def kill_node(cluster: Nodes, live: LiveRun, alive: list[Any]) -> None:
    cluster.kill(alive.pop())


def drain_node(cluster: Nodes, live: LiveRun, alive: list[Any]) -> None:
    cluster.drain(alive.pop(), seconds=120)


def kill_controller(cluster: Nodes, live: LiveRun, alive: list[Any]) -> None:
    send(actors("TrainController", cluster.address)[-1], signal.SIGKILL)


def stop_actor(name: str) -> Injection:
    """Return an injection that sends SIGSTOP to a helper actor of the run."""

    def stop(cluster: Nodes, live: LiveRun, alive: list[Any]) -> None:
        send(actors(name, cluster.address)[-1], signal.SIGSTOP)

    return stop


def add_node(cluster: Nodes, live: LiveRun, alive: list[Any]) -> None:
    alive.append(cluster.add(cpus=CPUS))


INJECTIONS: dict[str, Injection] = {
    "worker killed (SIGKILL)": kill_worker,
    "worker hung (SIGSTOP), 10 s allowed": stop_worker,
    "Ray Train's controller killed": kill_controller,
    "Ray Train's controller stopped, 10 s allowed": stop_actor("TrainController"),
    "node killed": kill_node,
    "node drained": drain_node,
    "node added": add_node,
}
# The figure of these faults is the longest time between two steps.
UNNOTICED: dict[str, Injection] = {
    "split coordinator stopped, 10 s allowed": stop_actor("SplitCoordinator"),
    "control channel stopped, 10 s allowed": stop_actor("ControlChannel"),
    "registry of hot copies stopped, 10 s allowed": stop_actor("ReplicaRegistry"),
    "store of hot copies stopped, 10 s allowed": stop_actor("ReplicaStore"),
}
"""Faults that do not stop the group."""
# Much longer than the 10 s after which a helper counts as hung.
UNNOTICED_SECONDS = 60.0
ALTERNATES = {"node killed": add_node, "node drained": add_node, "node added": drain_node}
"""Repair after each trial, not measured, so that the next trial starts with the same cluster."""
SIGNALS = {"driver interrupted (SIGTERM)": signal.SIGTERM, "driver killed": signal.SIGKILL}
# The last lines of the history die with the driver.
UNCOUNTED = "driver killed"
"""Fault after which the number of repeated steps is unknown."""


def disturbed(recipe: Path, name: str, kind: str, trials: int, log: Path) -> Trials:
    """Measure one run with repeated injections of the same fault."""
    with nodes() as cluster:
        alive = [cluster.add(cpus=CPUS)]
        if kind != "node added":
            alive.append(cluster.add(cpus=CPUS))
        live = LiveRun(recipe, name, log, "--address", cluster.address, f"steps={STEPS}")
        injection_times = []
        groups = 1
        for _ in range(trials):
            live.wait_for_size(len(alive), groups, SETTLED_STEPS)
            time.sleep(SETTLED_SECONDS)
            injection_times.append(time.time())
            INJECTIONS[kind](cluster, live, alive)
            groups = live.groups() + 1
            if kind in ALTERNATES:
                live.wait_for_size(len(alive), groups, SETTLED_STEPS)
                ALTERNATES[kind](cluster, live, alive)
                groups = live.groups() + 1
        live.wait_for_size(len(alive), groups, SETTLED_STEPS)
        live.send(signal.SIGINT)
        live.driver.wait(timeout=120)
        return [row(live, injection_time) for injection_time in injection_times], live.steps()


def unnoticed(recipe: Path, name: str, kind: str, trials: int, log: Path) -> Trials:
    """Measure one run in which a helper actor is stopped repeatedly."""
    with nodes() as cluster:
        alive = [cluster.add(cpus=CPUS), cluster.add(cpus=CPUS)]
        live = LiveRun(recipe, name, log, "--address", cluster.address, f"steps={STEPS}")
        live.wait_for_size(len(alive), 1, SETTLED_STEPS)
        injection_times = []
        for _ in range(trials):
            time.sleep(SETTLED_SECONDS)
            injection_times.append(time.time())
            UNNOTICED[kind](cluster, live, alive)
            time.sleep(UNNOTICED_SECONDS)
        live.send(signal.SIGINT)
        live.driver.wait(timeout=120)
        return [pause(live, injection_time) for injection_time in injection_times], live.steps()


def pause(live: LiveRun, begun: float) -> dict[str, Any]:
    """Return the longest time between two steps after `begun`."""
    end = begun + UNNOTICED_SECONDS
    times = [entry["time"] for entry in live.of_kind("step") if begun - 1 < entry["time"] < end]
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    faults = [entry for entry in live.of_kind("fault") if begun < entry["time"] < end]
    return {
        "detected_after": None,
        "next_step_after": round(longest, 2),
        "steps_lost": 0 if not faults else None,
        "faults": len(faults),
    }


def restarted(recipe: Path, name: str, kind: str, trials: int, log: Path) -> Trials:
    """Measure one run whose driver is signalled and restarted; times count from the signal."""
    arguments = ("workers.min=2", "workers.max=2", f"steps={STEPS}")
    live = LiveRun(recipe, name, log, *arguments)
    injection_times = []
    for trial in range(trials):
        live.wait_for_group(1, steps=SETTLED_STEPS)
        live.wait_for_checkpoint()
        injection_times.append(live.send(SIGNALS[kind]))
        live.driver.wait(timeout=120)
        live = LiveRun(recipe, name, log.with_suffix(f".{trial}"), *arguments)
    live.wait_for_group(1, steps=SETTLED_STEPS)
    live.wait_for_checkpoint()
    live.send(signal.SIGINT)
    live.driver.wait(timeout=120)
    return [row(live, injection_time) for injection_time in injection_times], live.steps()


def row(live: LiveRun, begun: float) -> dict[str, Any]:
    """Return the figures of the first change in the history after `begun`."""
    entries = sorted(live.entries(), key=lambda entry: float(entry["time"]))
    later_entries = [entry for entry in entries if entry["time"] > begun]
    start = next(entry for entry in later_entries if entry["kind"] == "started")
    fault_entries = [
        e for e in later_entries if e["kind"] in ("fault", "halted") and e["time"] <= start["time"]
    ]
    attempt = start["attempt"]
    step = next(e for e in later_entries if e["kind"] == "step" and e["attempt"] == attempt)
    rollbacks = [e for e in later_entries if e["kind"] == "rolled_back" and e["attempt"] == attempt]
    return {
        "detected_after": round(fault_entries[0]["time"] - begun, 2) if fault_entries else None,
        "next_step_after": round(step["time"] - begun, 2),
        "steps_lost": sum(entry["last"] - entry["first"] + 1 for entry in rollbacks),
        "state": start["state"],
        "world_size": start["world_size"],
        "stayed": start.get("stayed", 0),
        "phases": phases(begun, fault_entries[0], start, step) if fault_entries else {},
    }


def phases(begun: float, noted: Any, start: Any, step: Any) -> dict[str, float]:
    """Return the seconds from an injection to the next step, phase by phase.

    A group's `started` entry contains the seconds of its phases up to that entry.
    """
    of_group: dict[str, float] = start["seconds"]
    phase_seconds = {
        "noticed": noted["time"] - begun,
        "processes": start["time"] - sum(of_group.values()) - noted["time"],
        **of_group,
        "first step": step["time"] - start["time"],
    }
    return {name: round(seconds, 2) for name, seconds in phase_seconds.items()}


def draw(results: dict[str, Any]) -> None:
    """Draw a bar of phases for each kind whose trials have them."""
    bars = {}
    for kind, result in results.items():
        rows = sorted(result["trials"], key=lambda row: float(row["next_step_after"]))
        # The phases of one trial: medians of phases would not add up to the median of the time.
        if phase_seconds := rows[(len(rows) - 1) // 2].get("phases"):
            bars[kind] = phase_seconds
    figure = picture(8, 0.6 + 0.5 * len(bars))
    axes, left = figure.add_subplot(), dict.fromkeys(bars, 0.0)
    for phase in dict.fromkeys(itertools.chain.from_iterable(bars.values())):
        widths = {kind: phase_seconds.get(phase, 0.0) for kind, phase_seconds in bars.items()}
        axes.barh([*bars], [*widths.values()], left=[*left.values()], label=phase)
        left = {kind: left[kind] + width for kind, width in widths.items()}
    axes.set_xlabel("seconds from the fault to the next step")
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    figure.savefig(RESULTS / "faults.png")


def compared(steps: list[Any], undisturbed: list[Any]) -> dict[str, Any]:
    """Compare the steps that both runs have: same samples, and differences of losses."""
    expected = {step["step"]: step for step in undisturbed}
    pairs = [(step, expected[step["step"]]) for step in steps if step["step"] in expected]
    return {
        "steps_compared": len(pairs),
        "same_samples": all(one["digest"] == other["digest"] for one, other in pairs),
        "max_relative_loss_difference": max(
            abs(one["loss"] - other["loss"]) / abs(other["loss"]) for one, other in pairs
        ),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def of(key: str) -> dict[str, float]:
        values = [row[key] for row in rows if row[key] is not None]
        if not values:
            return {}
        return {"median": round(statistics.median(values), 2), "worst": max(values)}

    return {
        "detected_after_s": of("detected_after"),
        "next_step_after_s": of("next_step_after"),
        "steps_lost": of("steps_lost"),
        "trials": rows,
    }


def measure_of(kind: str) -> Callable[..., Trials]:
    """Return the function that measures trials of a kind of fault."""
    if kind in UNNOTICED:
        return unnoticed
    return disturbed if kind in INJECTIONS else restarted


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=[*INJECTIONS, *UNNOTICED, *SIGNALS])
    parser.add_argument("--add", action="store_true", help="keeps the other kinds' results")
    parser.add_argument("--anew", action="store_true", help="with workers.stay: false")
    arguments = parser.parse_args()
    figures: dict[str, Any] = known_result("faults") if arguments.add else {}
    results = figures.setdefault("started_anew" if arguments.anew else "kinds", {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = write_recipe(folder, steps=STEPS, stay=not arguments.anew)
        # Without in-memory checkpoints: nothing disturbs this run.
        plain = ("workers.max=2", "checkpoint.hot_steps=0")
        undisturbed_run = LiveRun(recipe, "undisturbed", folder / "whole", *plain)
        undisturbed_run.wait_for_more(COMPARED_STEPS)
        undisturbed_run.send(signal.SIGINT)
        undisturbed_run.driver.wait(timeout=120)
        for number, kind in enumerate(arguments.kinds):
            name, log = f"run-{number}", folder / f"log-{number}"
            measure = measure_of(kind)
            print(f"== {kind}", flush=True)
            rows, steps = measure(recipe, name, kind, arguments.trials, log)
            if kind == UNCOUNTED:
                rows = [{**row, "steps_lost": None} for row in rows]
            results[kind] = {**summary(rows), **compared(steps, undisturbed_run.steps())}
            write_result("faults", figures, ("elastrata", "ray", "torch"))
    draw(figures["kinds"])


if __name__ == "__main__":
    main()
