"""A run with a random history of faults, on a cluster of several nodes on this machine.

Trains a small model, kills and hangs workers, kills Ray Train's controller, kills, drains and adds
nodes, in an order drawn from the seed, some while the run still recovers from the one before. Then
the run must have ended well, `elastrata audit` must find it equal to an undisturbed one, and
nothing may be left behind.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from support.chaos import KINDS, Chaos
from support.command import run, wait_until
from support.live_run import LiveRun
from support.nodes import nodes
from support.short_steps import CPUS, HOT_STEPS, write_recipe

STEPS_PER_FAULT = 200
SHARED_MEMORY = Path("/dev/shm")
RAYS_OWN_ACTORS = ("_AutoscalingCoordinatorActor", "_StatsActor", "_UsageCollectionActor")
"""Detached actors that Ray makes once for a cluster and keeps."""
TORCHS_OWN_FILES = "torchinductor_"
"""A cache that torch makes once for a user and keeps."""
AUDITED = (
    "partition_ok",
    "equal",
    "steps",
    "digests_checked",
    "max_relative_loss_difference",
    "first_difference",
    "problems",
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run has gone through, and what came of it."""

    seed: int
    steps: int
    faults: list[dict[str, Any]]
    """Each with its kind and when it was injected, in seconds from the first step."""
    world_sizes: list[int]
    rolled_back: list[int]
    """Steps done again, for every recovery that had to."""
    seconds: float
    audit: dict[str, Any]
    leaks: list[str]


def rehearse(folder: Path, *, seed: int, faults: int, mixed: bool = False) -> Report:
    """One run, disturbed `faults` times, beside an undisturbed one.

    Args:
        folder: for data set, recipe, runs and logs.
        seed: of the history of faults.
        faults: how many.
        mixed: whether it trains on three sources, whose shares change.
    """
    steps = STEPS_PER_FAULT * (faults + 1)
    recipe = write_recipe(folder, steps=steps, mixed=mixed)
    print(f"an undisturbed run of {steps} steps", flush=True)
    LiveRun(recipe, "undisturbed", folder / "undisturbed.log", "workers.max=1").end(900)
    temporary = folder / "tmp"
    (temporary / "ray").mkdir(parents=True)  # Ray notes its newest cluster there
    before = traces(temporary)
    os.environ["TMPDIR"] = str(temporary)  # all that the cluster and the driver start inherits it
    print(f"a run with {faults} faults, seed {seed}", flush=True)
    started = time.time()
    with nodes() as cluster:
        address = ("--address", cluster.address)
        most = "workers.max_failures=-1"
        alive = [cluster.add(cpus=CPUS) for _ in range(2)]
        live = LiveRun(recipe, "disturbed", folder / "disturbed.log", *address, most)
        draw = random.Random(seed)
        chaos = Chaos(cluster, live, draw, alive)
        chaos.inject(draw.choice(KINDS) for _ in range(faults))
        live.end(900)
        seconds = time.time() - started
        leaks = cluster_leaks(cluster.address)
    leaks += sorted(left_behind(temporary, before))
    done = run("audit", folder / "runs" / "disturbed", folder / "runs" / "undisturbed", "--json")
    audit = json.loads(done.stdout.splitlines()[-1])
    return Report(
        seed=seed,
        steps=steps,
        faults=chaos.faults,
        world_sizes=[entry["world_size"] for entry in live.of_kind("started")],
        rolled_back=live.rolled_back(),
        seconds=round(seconds, 1),
        audit={key: audit[key] for key in AUDITED},
        leaks=leaks,
    )


def cluster_leaks(address: str) -> list[str]:
    """Actors and placement groups of the run that the cluster still has."""
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    try:
        with suppress(AssertionError):
            wait_until(lambda: not list(_cluster_leaks()), 30, "")
        return list(_cluster_leaks())
    finally:
        ray.shutdown()


def _cluster_leaks() -> Iterator[str]:
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE" and actor["ActorClassName"] not in RAYS_OWN_ACTORS:
            yield f"actor {actor['ActorClassName']}"
    for group in ray.util.placement_group_table().values():
        if group["state"] != "REMOVED":
            yield f"placement group {group['placement_group_id']}: {group['state']}"


def traces(temporary: Path) -> set[str]:
    """What there is, beside this process, of those that keep their temporary files there."""
    processes = {
        f"process {process.pid}: {_said(process.cmdline)}"
        for process in psutil.process_iter()
        if process.pid != os.getpid() and str(temporary) in _said(process.environ)
    }
    names = {path.name for path in temporary.iterdir()}
    files = {f"temporary file {name}" for name in names if not name.startswith(TORCHS_OWN_FILES)}
    return processes | files | {f"shared memory {path.name}" for path in SHARED_MEMORY.iterdir()}


def _said(question: Callable[[], object]) -> str:
    """What a process says of itself; nothing where it has ended."""
    try:
        return str(question())
    except psutil.Error:
        return ""


def left_behind(temporary: Path, before: set[str]) -> set[str]:
    """What has come since and does not go away within half a minute."""
    with suppress(AssertionError):
        wait_until(lambda: not traces(temporary) - before, 30, "")
    return traces(temporary) - before


def problems(report: Report, tolerance: float) -> list[str]:
    """What is wrong with a run's end, one line each."""
    audit = report.audit
    found = [f"left behind: {leak}" for leak in report.leaks]
    if not audit["partition_ok"] or audit["equal"] is not True:
        found.append(f"not the same run: {audit['first_difference']} {audit['problems']}")
    elif audit["max_relative_loss_difference"] > tolerance:
        found.append(f"losses differ by {audit['max_relative_loss_difference']:.1e}")
    if any(lost > HOT_STEPS for lost in report.rolled_back):
        found.append(f"steps done again: {report.rolled_back}, expected at most {HOT_STEPS} each")
    return found
