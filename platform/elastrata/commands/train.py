"""`elastrata train`: a recipe to a trained model, or an interrupted run to its end."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.commands.options import Address, Json, Overrides, RecipeName
from elastrata.terminal.console import open_console, print_json_line

if TYPE_CHECKING:
    from elastrata.recipe.recipe import Recipe


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="The run's name. The same name continues the same run.")
    ] = None,
    address: Address = None,
    go_on_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="COMMIT",
            help="Go back to this checkpoint of the run: its step, or its folder's name.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a recipe, or continue its run where it stopped."""
    from elastrata.api import run_name
    from elastrata.api import train as train_recipe
    from elastrata.recipe.file import load_recipe
    from elastrata.terminal.progress import Progress
    from elastrata.tracking.uri import tracking_uri
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    renamed = [f"name={json_text.dumps(name)}"] if name is not None else []
    chosen = load_recipe(recipe, [*(overrides or []), *renamed])
    console.print(f"run {run_name(chosen)}: starting Ray and the workers", markup=False)
    progress = Progress(
        chosen.steps_in_all, lambda line: console.print(line, markup=False), _phase_lines(chosen)
    )
    result = train_recipe(chosen, address=address, show=progress, go_on_from=go_on_from)
    uri = tracking_uri(chosen.tracking.uri, Storage(chosen.storage))
    lines = [
        f"done: {result.steps} steps, {result.samples_seen:,} samples, "
        f"{result.tokens_seen:,} tokens, loss {result.final_loss:.4f}",
        *([f"  target   {result.target}"] if result.target else []),
        f"  run      {result.run_dir}",
        f"  record   mlflow ui --backend-store-uri {uri}",
        f"  next     elastrata export {result.run_dir} --out MODEL_FOLDER",
    ]
    console.print("\n".join(lines), markup=False)
    if json:
        print_json_line(asdict(result))


def _phase_lines(recipe: Recipe) -> dict[int, str]:
    """By the first step of each phase a line about it."""
    first = accumulate((phase.steps for phase in recipe.phases), initial=1)
    return {
        step: f"phase {number} of {len(recipe.phases)}: {phase.name or phase.data.path}"
        for number, (step, phase) in enumerate(zip(first, recipe.phases, strict=False), start=1)
    }
