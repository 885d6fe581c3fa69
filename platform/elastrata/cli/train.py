"""`elastrata train`: a recipe to a trained model, or an interrupted run to its end."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Address, Json, OptionalRecipe, Overrides
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, format_command, pluralize

if TYPE_CHECKING:
    from elastrata.recipe.recipe import Recipe


def train(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run. An existing run is continued.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run to continue, instead of RECIPE and --name."),
    ] = None,
    address: Address = None,
    go_on_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="COMMIT",
            help="Go back to this checkpoint of the run: a step, or a folder's name.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a recipe, or resume its run."""
    arguments = [*([recipe] if recipe else []), *(overrides or [])]
    chosen = _load_resumed(resume, arguments, name) if resume else _load_named(arguments, name)
    train_and_show(chosen, address, json, go_on_from)


def train_and_show(
    chosen: Recipe, address: str | None, json: bool, go_on_from: str | None = None
) -> None:
    """Train a recipe, and show its progress and its result."""
    from elastrata.api import run_name
    from elastrata.api import train as train_recipe
    from elastrata.recipe.data_sets import resolve_steps
    from elastrata.terminal.progress import Progress, phase_lines
    from elastrata.tracking.store import tracking_uri
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    # The display needs the number of steps, which the data decides for epochs or tokens.
    chosen = resolve_steps(chosen)
    console.print(f"run {run_name(chosen)}: starting Ray and the workers", markup=False)
    with Progress(chosen.steps_in_all, console, phase_lines(chosen)) as progress:
        result = train_recipe(chosen, address=address, show=progress, go_on_from=go_on_from)
    uri = tracking_uri(chosen.tracking.uri, Storage(chosen.storage))
    lines = [
        f"done: {pluralize(result.steps, 'step')}, {pluralize(result.samples_seen, 'sample')}, "
        f"{pluralize(result.tokens_seen, 'token')}, loss {result.final_loss:.4f}",
        *([f"  target   {result.target}"] if result.target else []),
        f"  run      {result.run_dir}",
        f"  record   {format_command('mlflow', 'ui', '--backend-store-uri', uri)}",
        f"  next     {format_export(result.run_dir)}",
    ]
    console.print("\n".join(lines), markup=False)
    if json:
        print_json_line(asdict(result))


def format_export(run: str) -> str:
    """Return the command that exports a run, with a placeholder for the model's folder."""
    return format_command("elastrata", "export", run, "--out", "MODEL_FOLDER")


def _load_named(arguments: list[str], name: str | None) -> Recipe:
    from elastrata.recipe.file import load_recipe

    if not arguments:
        raise UserError("expected a recipe, such as bert/tiny, or --resume RUN")
    name_override = [f"name={json_text.dumps(name)}"] if name is not None else []
    return load_recipe(arguments[0], [*arguments[1:], *name_override])


def _load_resumed(run: str, arguments: list[str], name: str | None) -> Recipe:
    from elastrata.run.claim import find_run_folder
    from elastrata.run.folder import read_resumed_recipe

    if name is not None:
        raise UserError(f"--name: {name}: unexpected: --resume {run} keeps the name of the run")
    # The first positional argument is read as a recipe's name, which a resumed run already has.
    if arguments and "=" not in arguments[0]:
        raise UserError(
            f"{arguments[0]}: unexpected: --resume {run} keeps the recipe of the run; "
            "overrides have the form KEY=VALUE"
        )
    return read_resumed_recipe(find_run_folder(run), arguments)
