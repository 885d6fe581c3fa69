"""`elastrata sweep`: many trials of one recipe, to find the values that do best."""

from __future__ import annotations

import json as json_text
from typing import Annotated

import typer

from elastrata.commands.options import Address, Json, Overrides
from elastrata.terminal.console import open_console, print_json_line

_INTERRUPTED = 130


def sweep(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep's file.")],
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="The sweep's name. The same name continues the same sweep.")
    ] = None,
    address: Address = None,
    json: Json = False,
) -> int:
    """Try values of a recipe's keys, or continue a sweep where it stopped."""
    from elastrata.api import sweep as run_sweep
    from elastrata.sweeps.file import load_sweep
    from elastrata.terminal.sweep_progress import SweepProgress, rich_table

    console = open_console(as_json=json)
    renamed = [f"name={json_text.dumps(name)}"] if name is not None else []
    chosen = load_sweep(sweep, [*(overrides or []), *renamed])
    console.print(f"sweep {chosen.name}: starting Ray and the trials", markup=False)
    with SweepProgress(chosen.space, console) as progress:
        result = run_sweep(chosen, address=address, show=progress, warn=progress.warn)
    console.print(rich_table(result.standings, chosen.space, len(result.standings.trials)))
    best = result.best
    lines = [
        f"best: trial {best.id}, {chosen.metric} {result.best_value:.5g}"
        if best
        else "no trial has a value",
        *([f"  {key}={json_text.dumps(value)}" for key, value in result.best_values.items()]),
        f"  sweep    {result.folder}",
        f"  report   {result.folder}/report.html",
    ]
    console.print("\n".join(lines), markup=False)
    if json:
        print_json_line(result.summary())
    return 0 if result.status == "FINISHED" else _INTERRUPTED
