"""Equal losses at any size and through faults: 1 to 4 workers, and a run with faults.

    PYTHONPATH=tests python benchmarks/elasticity.py ../shared/data/wikitext

Trains a small BERT in fp32 on WikiText with 1, 2, 3 and 4 workers. Trains it once more on a cluster
of several nodes, with every kind of fault of `make chaos`, and a driver that is interrupted and
restarted. Compares every step with that of the run with one worker. Repeats all of it with
`parallel.virtual_ranks`, whose cost is the ratio of the median seconds of a step. Writes
`results/elasticity_plain.json` and `elasticity_exact.json`, each with a picture of the number of
workers and of the losses.

With `--resizes`, trains on 1 worker, and on 1 to 4 of them that come and go, with virtual ranks;
writes `results/elasticity.json` and the README's picture, `elasticity.png`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from harness import RESULTS, parser_of, picture, wikitext_source, write_result

from elastrata.run.audit import compare, relative_difference
from support.chaos import KINDS, Chaos
from support.command import run_json
from support.live_run import LiveRun
from support.nodes import nodes

SIZES = (1, 2, 3, 4)
STEPS, CURVE_POINTS, LAST_STEPS = 300, 50, 50
STEPS_OF_A_SIZE = 40
# 12 virtual ranks are divisible by 1, 2, 3 and 4 workers.
# The fused AdamW rounds the last elements of a shard differently, so that results would depend on
# the number of workers.
OVERRIDES = {"plain": (), "exact": ("parallel.virtual_ranks=12", "optimizer.fused=false")}
AUDITED = ("partition_ok", "steps", "equal", "first_difference", "max_relative_loss_difference")
DISTURBED = "through faults"
Runs = Mapping[str, Sequence[Any]]
"""The steps of every run, by name; the run with one worker comes first."""


def write_recipe(folder: Path, wikitext: Path) -> Path:
    """Write a recipe of BERT-tiny on WikiText to `folder`, and prepare its data."""
    values = {
        "extends": "bert/tiny",
        "data": {
            "path": str(folder / "data"),
            "prepare": {
                "sources": [wikitext_source(wikitext, "train")],
                "held_out": [wikitext_source(wikitext, "validation")],
                "tokenizer": {"vocab_size": 4096},
                "seq_len": 128,
            },
        },
        "steps": STEPS,
        "batch_size": 24,
        "micro_batch_tokens": 1024,
        "schedule": {"warmup_steps": 50},
        "evaluation": {"every": STEPS},
        "checkpoint": {"every": 200, "hot_steps": 10},
        "workers": {
            "min": 1,
            "max": 3,
            "cpus": 1,
            "threads": 1,
            "max_failures": -1,
            "hang_seconds": 15,
            "resize_seconds": 1,
        },
        "storage": str(folder / "runs"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    run_json("prepare", folder / "recipe.yaml")
    return folder / "recipe.yaml"


def undisturbed(recipe: Path, kind: str, size: int, *overrides: str) -> list[Any]:
    """Return the steps of a run with `size` workers from start to end."""
    # Less than a core each, so that four workers fit on a machine with two cores.
    workers = [f"workers.{key}={value}" for key, value in
               {"min": size, "max": size, "cpus": 0.4, "spares": "false"}.items()]  # fmt: skip
    name = f"{kind}-{size}"
    live = LiveRun(recipe, name, recipe.parent / f"log-{name}", *workers, *overrides)
    live.end(1800)
    return live.steps()


def disturbed(recipe: Path, kind: str, *overrides: str) -> tuple[LiveRun, list[dict[str, Any]]]:
    """Run through every kind of fault; return the run and the faults in order."""
    # Seeded, so that the faults come in the same order every time.
    draw = random.Random(0)
    name = f"{kind}-disturbed"
    log = recipe.parent / f"log-{name}"
    with nodes() as cluster:
        alive = [cluster.add(cpus=1) for _ in range(2)]
        arguments = ("--address", cluster.address, *overrides)
        live = LiveRun(recipe, name, log, *arguments)
        chaos = Chaos(cluster, live, draw, alive, at_once=0.0)
        chaos.inject(KINDS)
        live.wait_for_group(live.groups())
        live.send(signal.SIGTERM)
        # 130 is the exit code of an interrupted run that can resume.
        assert live.driver.wait(timeout=120) == 130, live.output
        faults = [*chaos.faults, {"kind": "interrupt driver (SIGTERM), start it again"}]
        live = LiveRun(recipe, name, log.with_suffix(".again"), *arguments)
        live.end(1800)
    return live, faults


def resized(recipe: Path, *overrides: str) -> LiveRun:
    """Run on 1 worker, then on 3, 4, 2 and 4 of them, each for at least 40 steps."""
    with nodes() as cluster:
        alive = [cluster.add(cpus=1)]
        arguments = ("--address", cluster.address, "workers.max=4", *overrides)
        live = LiveRun(recipe, "resized", recipe.parent / "log-resized", *arguments)
        group = 1
        live.wait_for_size(1, group, STEPS_OF_A_SIZE)
        for size in (3, 4, 2, 4):
            group = live.groups() + 1
            while len(alive) < size:
                alive.append(cluster.add(cpus=1))
            while len(alive) > size:
                cluster.kill(alive.pop())
            live.wait_for_size(size, group, STEPS_OF_A_SIZE)
        live.end(1800)
    return live


def audited(folder: Path, *names: str) -> dict[str, Any]:
    """Return the findings of `elastrata audit` on two runs, without the folders."""
    findings = run_json("audit", *(folder / name for name in names))
    return {key: findings[key] for key in AUDITED}


def differences(runs: Runs) -> dict[str, Any]:
    """Compare every other run with the first one."""
    (_, first), *other_runs = runs.items()
    by_run = {}
    for name, steps in other_runs:
        comparison = compare(first, steps, tolerance=1e-4)
        last_differences = [
            relative_difference(one["loss"], other["loss"])
            for one, other in zip(first[-LAST_STEPS:], steps[-LAST_STEPS:], strict=True)
        ]
        by_run[name] = {
            "same_samples_in_every_step": comparison.equal,
            "max_relative_loss_difference": comparison.max_relative_loss_difference,
            f"max_in_the_last_{LAST_STEPS}_steps": max(last_differences),
        }
    return by_run


def draw_curves(runs: Runs, path: Path) -> None:
    """Draw the number of workers of the disturbed run, and its losses beside those of 1 worker."""
    (_, first), *_, (_, disturbed_steps) = runs.items()
    difference = max(
        relative_difference(one["loss"], other["loss"])
        for one, other in zip(first, disturbed_steps, strict=True)
    )
    numbers = [step["step"] for step in first]
    sizes = [step["world_size"] for step in disturbed_steps]
    figure = picture(8, 4.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    above.fill_between(numbers, sizes, step="mid", color="tab:blue", alpha=0.25, linewidth=0)
    above.step(numbers, sizes, where="mid", color="tab:blue", linewidth=1.5)
    above.set_ylim(0, max(sizes) + 0.6)
    above.set_yticks(range(max(sizes) + 1))
    above.set_ylabel("workers")
    above.set_title("Workers come and go; the loss stays the same", loc="left")
    label = f"workers that come and go (largest relative difference: {difference:.1g})"
    below.plot(numbers, [s["loss"] for s in first], "tab:orange", linewidth=4, alpha=0.45,
               label="1 worker, undisturbed")  # fmt: skip
    below.plot(numbers, [s["loss"] for s in disturbed_steps], "tab:blue", linewidth=1, label=label)
    below.set_ylabel("loss (nats)")
    below.set_xlabel("optimizer step")
    below.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def curve(steps: Sequence[Any]) -> list[tuple[int, float]]:
    """Return some steps with their losses."""
    return [(s["step"], s["loss"]) for s in steps[:: max(1, len(steps) // CURVE_POINTS)]]


def measure(recipe: Path, kind: str, *overrides: str) -> tuple[Runs, dict[str, Any]]:
    """Return all runs of one kind, and their figures."""
    runs = {
        f"{size} worker{'s' * (size > 1)}": undisturbed(recipe, kind, size, *overrides)
        for size in SIZES
    }
    live, faults = disturbed(recipe, kind, *overrides)
    runs[DISTURBED] = live.steps()
    folder = recipe.parent / "runs"
    return runs, {
        "differences_from_1_worker": differences(runs),
        DISTURBED: {
            "faults": faults,
            "world_sizes": [entry["world_size"] for entry in live.of_kind("started")],
            "world_size_of_each_step": [step["world_size"] for step in runs[DISTURBED]],
            "steps_done_again": live.rolled_back(),
            "audit": audited(folder, f"{kind}-disturbed", f"{kind}-1"),
        },
        "median_step_seconds": {
            name: round(statistics.median(step["seconds"] for step in steps), 4)
            for name, steps in runs.items()
            if name != DISTURBED
        },
        "losses": {name: curve(steps) for name, steps in runs.items()},
    }


def measure_resizes(recipe: Path) -> None:
    """Draw and write a run whose workers come and go, beside one with 1 worker."""
    overrides = OVERRIDES["exact"]
    runs = {
        "1 worker": undisturbed(recipe, "exact", 1, *overrides),
        "1 to 4 workers": resized(recipe, *overrides).steps(),
    }
    draw_curves(runs, RESULTS / "elasticity.png")
    figures = {
        "overrides": overrides,
        "steps": STEPS,
        "differences_from_1_worker": differences(runs),
        "world_sizes": [step["world_size"] for step in runs["1 to 4 workers"]],
    }
    write_result("elasticity", figures, ("elastrata", "ray", "torch"))


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--kinds", nargs="*", default=list(OVERRIDES))
    parser.add_argument("--resizes", action="store_true")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        recipe = write_recipe(Path(scratch), arguments.wikitext)
        if arguments.resizes:
            measure_resizes(recipe)
            return
        for kind in arguments.kinds:
            runs, figures = measure(recipe, kind, *OVERRIDES[kind])
            draw_curves(runs, RESULTS / f"elasticity_{kind}.png")
            figures = {"overrides": OVERRIDES[kind], "steps": STEPS, **figures}
            write_result(f"elasticity_{kind}", figures, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
