"""`elastrata runs`: the runs there are, and how each of them stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Json
from elastrata.terminal.console import STATE_STYLES, open_console, print_json_line

if TYPE_CHECKING:
    from rich.table import Table

    from elastrata.run.names import ListedRun

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def runs(
    storage: Annotated[
        str, typer.Argument(metavar="[STORAGE]", help="Folder or URL where runs are kept.")
    ] = "runs",
    json: Json = False,
) -> None:
    """List the runs in a folder: state, step, loss, workers, and when each gave a sign of life."""
    from elastrata.run.names import list_runs
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    found = list_runs(Storage(storage))
    if found:
        console.print(_table(found))
    else:
        console.print(f"{Storage(storage).uri()}: no runs here", markup=False)
    for run in found:
        if run.state is None:
            console.print(f"{run.name}: {run.text}", markup=False, style="red")
    if json:
        print_json_line({"storage": Storage(storage).uri(), "runs": [asdict(run) for run in found]})


def _table(found: Sequence[ListedRun]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), header_style="bold", pad_edge=False)
    for heading in ("run", "state", "step", "loss", "workers", "seen"):
        table.add_column(heading, justify="left" if heading in ("run", "state") else "right")
    for run in found:
        state = run.state or "unreadable"
        table.add_row(
            Text(run.name),
            Text(state, style=STATE_STYLES.get(state, "red")),
            f"{run.steps:,}/{run.steps_in_all:,}",
            "" if run.loss is None else f"{run.loss:.4f}",
            str(run.workers or ""),
            "never" if run.seen is None else f"{_age(time.time() - run.seen)} ago",
        )
    return table


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
