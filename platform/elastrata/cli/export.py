"""`elastrata export`: a run's checkpoint to a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Json, RunName, local_path
from elastrata.terminal.console import open_console, print_json_line

if TYPE_CHECKING:
    from elastrata.run.export import ExportedModel


def export(
    run: RunName,
    out: Annotated[
        Path,
        typer.Option(callback=local_path, help="Folder to write; must not exist or be empty."),
    ],
    checkpoint: Annotated[
        str, typer.Option(help="newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    weights: Annotated[
        str,
        typer.Option(
            help="trained, average (the recipe's `average`), or mean:K, of the last K checkpoints."
        ),
    ] = "trained",
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32, bf16 or fp16.")] = "fp32",
    shard_size: Annotated[
        str, typer.Option(help="Most bytes of a file of weights, such as 500MB or 5GB.")
    ] = "5GB",
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            help="Push it to the Hugging Face Hub, too: OWNER/NAME, made where it is missing.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make that repository for everybody to see.")
    ] = False,
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
    from elastrata.core.weight_files import weight_form
    from elastrata.run.claim import named_run
    from elastrata.run.export import HubRepository, check_free, export_model
    from elastrata.tracking.tracker import check_model_name

    form = weight_form(dtype, shard_size)
    if register is not None:
        check_model_name(register)
    run = named_run(run).url
    check_free(out)
    repository = HubRepository(push, public=public) if push is not None else None
    model = export_model(run, out, checkpoint=checkpoint, weights=weights, form=form)
    loader = model.recipe.workload.exported_as.loader
    registered = None if register is None else _register(run, model, register, checkpoint)
    pushed = repository.push(model.path, f"Step {model.step:,}") if repository else None
    console = open_console(as_json=json)
    lines = [
        f"model    {model.path}",
        f"next     from transformers import {loader}; {loader}.from_pretrained('{model.path}')",
        *([f"mlflow   mlflow.transformers.load_model('{registered}')"] if registered else []),
        *([f"pushed   {pushed}"] if pushed else []),
    ]
    console.print("\n".join(lines), markup=False)
    if json:
        found = {"path": str(model.path), "loader": loader, "registered": registered}
        print_json_line({**found, "dtype": model.dtype, "pushed": pushed})


def _register(run: str, model: ExportedModel, name: str, checkpoint: str) -> str:
    from elastrata.run.export import loadable
    from elastrata.tracking.tracker import register_export
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
