"""The harness of all benchmarks: arguments, medians over rounds, pictures, and the result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser_of(
    doc: str | None, *, rounds: int | None = None, wikitext: bool = False
) -> argparse.ArgumentParser:
    """A parser that says what the benchmark's first line says.

    Args:
        doc: the docstring of the benchmark.
        rounds: the default of `--rounds`, where there is that option.
        wikitext: whether the first argument is the folder of WikiText.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if wikitext:
        help_line = "folder with train.txt and validation.txt"
        parser.add_argument("wikitext", type=Path, help=help_line)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


@contextmanager
def scratch_folder(wanted: Path | None = None) -> Iterator[Path]:
    """The folder that is wanted, made where it is not there, or one that goes away again."""
    if wanted:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def medians(rounds: Sequence[Mapping[str, float]], digits: int | None = None) -> dict[str, float]:
    """The median over the rounds of every figure of the first one, rounded to some digits."""
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    if digits is None:
        return found
    return {name: round(value, digits) for name, value in found.items()}


def cpu_milliseconds(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU time of each, taken turn by turn in random order, after a round that warms up.

    CPU time of the process, because a busy machine stretches the time on the clock.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            began = time.process_time()
            runs[name]()
            taken[name].append(1e3 * (time.process_time() - began))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def of_version(checkout: Path | None, *arguments: str) -> Any:
    """The JSON value that this very script prints last, where it is run with these arguments and
    the Elastrata in a checkout, such as one that `git worktree add` made; None: with this one."""
    paths = [str(checkout / folder) for folder in _FOLDERS] if checkout else []
    done = subprocess.run(
        [sys.executable, sys.argv[0], *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return json.loads(done.stdout.splitlines()[-1])


def picture(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def known_result(name: str) -> dict[str, Any]:
    """The figures of `results/<name>.json`, where an earlier run left it."""
    path = RESULTS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: value for key, value in known.items() if key not in _ABOUT}


_FOLDERS = ("platform", "workloads", "pipelines")
_ABOUT = ("command", "machine", "versions")


def write_result(name: str, figures: Mapping[str, Any], packages: Sequence[str]) -> None:
    """Prints figures and writes them to `results/<name>.json`, with command, machine and versions.

    Of absolute paths on the command line only the last part is kept.

    Args:
        name: of the benchmark's file.
        figures: JSON values; `machine` among them replaces that of this machine.
        packages: those whose versions matter.
    """
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    about = {
        "command": " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *words]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({**about, **figures}, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(figures, indent=1))
