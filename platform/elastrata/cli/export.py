"""`elastrata export`: a run's checkpoint to a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Json, RunName
from elastrata.terminal.console import open_console, print_json_line

if TYPE_CHECKING:
    from elastrata.run.export import ExportedModel


def export(
    run: RunName,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
    checkpoint: Annotated[
        str, typer.Option(help="newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    weights: Annotated[
        str,
        typer.Option(
            help="trained, average (the recipe's `average`), or mean:K, of the last K checkpoints."
        ),
    ] = "trained",
    register: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Keep it in MLflow, too, as a version of the model NAME; alias: newest or best.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a trained model as a folder for transformers' from_pretrained."""
    from elastrata.run.export import export_model
    from elastrata.run.names import named_run
    from elastrata.tracking.registry import check_model_name

    if register is not None:
        check_model_name(register)
    run = named_run(run).url
    model = export_model(run, out, checkpoint=checkpoint, weights=weights)
    loader = model.recipe.workload.exported_as.loader
    registered = None if register is None else _register(run, model, register, checkpoint)
    console = open_console(as_json=json)
    lines = [
        f"model    {model.path}",
        f"next     from transformers import {loader}; {loader}.from_pretrained('{model.path}')",
        *([f"mlflow   mlflow.transformers.load_model('{registered}')"] if registered else []),
    ]
    console.print("\n".join(lines), markup=False)
    if json:
        print_json_line({"path": str(model.path), "loader": loader, "registered": registered})


def _register(run: str, model: ExportedModel, name: str, checkpoint: str) -> str:
    from elastrata.run.export import loadable
    from elastrata.tracking.registry import register_export
    from elastrata_pipelines.storage import Storage

    root, _, run_name = Storage(run).uri().rpartition("/")
    with TemporaryDirectory() as scratch:
        return register_export(
            model.recipe.tracking,
            Storage(root),
            run_id=model.mlflow_run_id,
            run_name=run_name,
            model=loadable(model, Path(scratch)),
            name=name,
            alias=checkpoint if checkpoint in ("newest", "best") else None,
        )
