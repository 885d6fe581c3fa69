"""`elastrata export`: a run's checkpoint to a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastrata.commands.options import Json, RunName
from elastrata.terminal.console import open_console, print_json_line


def export(
    run: RunName,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
    checkpoint: Annotated[
        str, typer.Option(help="newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    json: Json = False,
) -> None:
    """Write a trained model as a folder for transformers' from_pretrained."""
    from elastrata.checkpoints.export import export as export_run
    from elastrata.runs.names import named_run

    path = export_run(named_run(run).url, out, checkpoint=checkpoint)
    console = open_console(as_json=json)
    console.print(
        f"model    {path}\n"
        f"next     from transformers import AutoModel; AutoModel.from_pretrained('{path}')",
        markup=False,
    )
    if json:
        print_json_line({"path": str(path)})
