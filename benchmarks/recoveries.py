"""What is held after many recoveries of one run: by a worker that stays, by the driver, and by the
machine.

    PYTHONPATH=tests python benchmarks/recoveries.py [--recoveries N]

Trains a small model with two workers on a Ray cluster on this machine. One of them stays; the other
one gets SIGKILL again and again, each time once the group that has taken its successor in has done
some steps. After every recovery it counts threads, open files and memory of the worker that stays,
and of the driver; processes of Ray's actors; and files in shared memory. What leaks grows from one
recovery to the next: beside the counts stands the growth from the fifth recovery, when caches and
pools are full, to the last. The run's digests are compared with those of an undisturbed run. Writes
results/recoveries.json.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import parser_of, write_result

from faults import compared, row
from support.command import kill_started
from support.live_run import LiveRun
from support.nodes import actors, nodes, send, train_workers
from support.short_steps import write_recipe

STEPS = 100_000
STEPS_BETWEEN = 30
COMPARED = 1000
"""Steps of the undisturbed run, at most."""
SETTLED = 5
"""Recoveries after which a process holds what it will hold."""
SHARED_MEMORY = Path("/dev/shm")


def held(process: psutil.Process) -> dict[str, int]:
    """The threads, open files and resident bytes of a process."""
    return {
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "bytes": process.memory_info().rss,
    }


def counts(stays: psutil.Process, driver: psutil.Process, address: str) -> dict[str, Any]:
    """All that is counted after a recovery."""
    shared = [path for path in SHARED_MEMORY.iterdir() if path.is_file()]
    return {
        "worker": held(stays),
        "driver": held(driver),
        "actors": len(actors("", address)),
        "shared_memory_files": len(shared),
    }


def recoveries(folder: Path, number: int) -> tuple[LiveRun, list[dict[str, Any]], list[float]]:
    """The run, what was held after each recovery, and when each worker was killed."""
    recipe = write_recipe(folder, steps=STEPS)
    size = ("workers.min=2", "workers.max=2", "workers.max_failures=-1")
    rows, killed = [], []
    with nodes() as cluster:
        cluster.add(cpus=2)
        live = LiveRun(recipe, "run", folder / "log", "--address", cluster.address, *size)
        live.wait_for_group(1, steps=STEPS_BETWEEN)
        stays, lost = train_workers(cluster.address)
        driver = psutil.Process(live.driver.pid)
        for recovery in range(number):
            killed.append(time.time())
            send(lost, signal.SIGKILL)
            live.wait_for_group(recovery + 2, steps=STEPS_BETWEEN)
            (lost,) = [one for one in train_workers(cluster.address) if one != stays]
            rows.append(counts(stays, driver, cluster.address))
            print(recovery + 1, rows[-1], flush=True)
        live.send(signal.SIGINT)
        live.driver.wait(timeout=120)
    return live, rows, killed


def growth(rows: list[dict[str, Any]], *keys: str) -> int:
    """How much more there was after the last recovery than after the fifth."""
    before, after = (value_at(rows[number], keys) for number in (SETTLED - 1, -1))
    return after - before


def value_at(row: dict[str, Any], keys: tuple[str, ...]) -> int:
    """The number under nested keys."""
    value: Any = row
    for key in keys:
        value = value[key]
    return int(value)


COUNTED = (
    *((process, count) for process in ("worker", "driver") for count in ("threads", "files")),
    ("worker", "bytes"),
    ("driver", "bytes"),
    ("actors",),
    ("shared_memory_files",),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recoveries", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            live, rows, killed = recoveries(folder, arguments.recoveries)
            steps = live.steps()
            plain = ("workers.max=1", "checkpoint.hot_steps=0", f"steps={STEPS}")
            whole = LiveRun(folder / "recipe.yaml", "whole", folder / "whole", *plain)
            whole.wait_for_more(min(len(steps), COMPARED))
            whole.send(signal.SIGINT)
            whole.driver.wait(timeout=120)
            same = compared(steps, whole.steps())
        finally:
            kill_started()
        seconds = [row(live, begun)["next_step_after"] for begun in killed]
        figures = {
            "recoveries": len(rows),
            "all_stayed": [entry["stayed"] for entry in live.of_kind("started")[1:]]
            == [1] * len(rows),
            "next_step_after_s": {"median": statistics.median(seconds), "worst": max(seconds)},
            "growth_from_the_fifth_to_the_last": {
                " ".join(keys): growth(rows, *keys) for keys in COUNTED
            },
            **same,
            "after_each": rows,
        }
    write_result("recoveries", figures, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
