"""A run that another version of Elastrata began, and this one ends: equal to one that it did whole.

    PYTHONPATH=tests python benchmarks/across_versions.py --python OTHER/bin/python

The other version is what that Python imports. It trains a tiny BERT once without a break, and again
until its first checkpoint, when it gets a SIGTERM. This version goes on with the second run, and
its audit compares the two: every step's digest of samples, and its loss. Writes
benchmarks/results/across_versions.json.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import parser_of, scratch_folder, write_result

from support.short_steps import write_recipe

STEPS = 600
AUDITED = ("partition_ok", "equal", "steps", "digests_checked", "max_relative_loss_difference")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--python", required=True, help="the Python of the other version")
    with scratch_folder() as folder:
        figures = _measure(parser.parse_args().python, folder)
    write_result("across_versions", figures, ["torch", "ray"])


def _measure(other: str, folder: Path) -> dict[str, Any]:
    recipe = write_recipe(folder, steps=STEPS)
    train = ("train", str(recipe), "workers.max=1", "--name")
    _elastrata(other, *train, "whole")
    _begin(other, *train, "begun")
    _elastrata(sys.executable, *train, "begun")
    runs = [str(folder / "runs" / name) for name in ("begun", "whole")]
    audit = json.loads(_elastrata(sys.executable, "audit", *runs, "--json").splitlines()[-1])
    attempts = [{key: a[key] for key in ("first", "last", "state")} for a in audit["attempts"]]
    return {**{key: audit[key] for key in AUDITED}, "attempts": attempts}


def _elastrata(python: str, *arguments: str) -> str:
    command = [python, "-m", "elastrata", *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def _begin(python: str, *arguments: str) -> None:
    """Trains until the first checkpoint, whose line a run prints; then interrupts it."""
    command = [python, "-m", "elastrata", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as run:
        assert run.stdout
        for line in run.stdout:
            if line.startswith("checkpoint of step"):
                run.send_signal(signal.SIGTERM)
                break
        run.stdout.read()
    assert run.returncode == 130, run.returncode


if __name__ == "__main__":
    main()
