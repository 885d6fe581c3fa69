"""`elastrata schema`: the JSON Schema of recipes."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from elastrata.commands.options import Json
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError


def schema(
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the JSON Schema of recipes, for completion and checks in an editor."""
    from elastrata.recipe.json_schema import recipe_schema

    found = recipe_schema()
    if out is not None:
        try:
            out.write_text(json_text.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out: {out}: cannot be written ({error.strerror})") from None
        console = open_console(as_json=json)
        console.print(
            f"schema   {out.resolve()}\n"
            "next     begin a recipe with this line, and the editor knows its keys:\n"
            f"         # yaml-language-server: $schema={out}",
            markup=False,
        )
        if json:
            print_json_line({"path": str(out.resolve())})
    elif json:
        print_json_line(found)
    else:
        typer.echo(json_text.dumps(found, indent=1))
