"""`elastrata sweep`: many trials of one recipe, to find the best values."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Address, Json, Overrides
from elastrata.cli.train import format_export, train_and_show
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, format_command

if TYPE_CHECKING:
    from elastrata.sweeps.result import SweepResult

# The exit code of an interrupted command, as in `main`.
_INTERRUPTED = 130


def sweep(
    sweep: Annotated[str | None, typer.Argument(metavar="[SWEEP]", help="File of a sweep.")] = None,
    overrides: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the sweep or, with --train, the run. An existing one is continued."
        ),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(metavar="NAME|FOLDER", help="Show the best trial of an earlier sweep."),
    ] = None,
    train: Annotated[
        bool,
        typer.Option("--train", help="With --best: train a full run with its values."),
    ] = False,
    address: Address = None,
    json: Json = False,
) -> int:
    """Search for the best values of a recipe's keys, or resume a sweep."""
    # With --best the first positional argument is a change, too.
    changes = [text for text in (sweep, *(overrides or [])) if text]
    if best is not None:
        return _use_best(best, changes, name, train, address, json)
    if train:
        raise UserError("--train: requires --best NAME, the sweep whose best values to train")
    if sweep is None:
        raise UserError("expected a sweep's file, or --best NAME of an earlier sweep")
    return _run_sweep(sweep, changes[1:], name, address, json)


def _run_sweep(
    file: str, overrides: list[str], name: str | None, address: str | None, json: bool
) -> int:
    from elastrata.api import sweep as run_sweep
    from elastrata.sweeps.config import load_sweep
    from elastrata.terminal.sweep_progress import SweepProgress

    console = open_console(as_json=json)
    name_override = [f"name={json_text.dumps(name)}"] if name is not None else []
    loaded = load_sweep(file, [*overrides, *name_override])
    console.print(f"sweep {loaded.name}: starting Ray and the trials", markup=False)
    with SweepProgress(loaded.space, console) as progress:
        result = run_sweep(loaded, address=address, show=progress, warn=progress.warn)
    _show_result(result, json)
    return 0 if result.status == "FINISHED" else _INTERRUPTED


def _use_best(
    place: str,
    overrides: list[str],
    name: str | None,
    train: bool,
    address: str | None,
    json: bool,
) -> int:
    """Show the best trial, or train its values."""
    from elastrata.sweeps.config import parse_changes
    from elastrata.sweeps.result import best_recipe, find_sweep

    result = find_sweep(place)
    if not train:
        if overrides or name is not None:
            raise UserError("--best: --name and overrides require --train")
        _show_result(result, json)
        return 0
    name_change = {"name": name} if name is not None else {}
    train_and_show(best_recipe(result, {**parse_changes(overrides), **name_change}), address, json)
    return 0


def _show_result(result: SweepResult, json: bool) -> None:
    """Print the result of a sweep and the commands to continue with."""
    from elastrata.terminal.sweep_progress import rich_table

    console = open_console(as_json=json)
    standings = result.standings
    console.print(rich_table(standings, result.config.space, len(standings.trials)))
    best, folder = result.best, result.folder
    lines = [
        f"best: trial {best.id}, {result.config.metric} {result.best_value:.5g}"
        if best
        else "no trial has a value",
        *(f"  {key}={json_text.dumps(value)}" for key, value in result.best_values.items()),
        f"  sweep    {folder}",
        f"  report   {folder}/report.html",
    ]
    if best:
        lines += [
            f"  train    {format_command('elastrata', 'sweep', '--best', folder, '--train')}",
            f"  export   {format_export(f'{folder}/trials/{best.id}')}",
        ]
    console.print("\n".join(lines), markup=False)
    if json:
        print_json_line(result.summary())
