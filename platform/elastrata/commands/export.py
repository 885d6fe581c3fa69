"""`elastrata export`: a run's checkpoint to a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastrata.commands.options import Json
from elastrata.terminal.console import open_console, print_json_line


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder or URL of a run, such as runs/bert-tiny.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
    checkpoint: Annotated[
        str, typer.Option(help="newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    json: Json = False,
) -> None:
    """Write a trained model as a folder for transformers' from_pretrained."""
    from elastrata.checkpoints.export import export_model

    model = export_model(run, out, checkpoint=checkpoint)
    loader = model.workload.exported_as.loader
    console = open_console(as_json=json)
    console.print(
        f"model    {model.path}\n"
        f"next     from transformers import {loader}; {loader}.from_pretrained('{model.path}')",
        markup=False,
    )
    if json:
        print_json_line({"path": str(model.path), "loader": loader})
