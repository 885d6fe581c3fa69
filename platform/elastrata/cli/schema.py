"""`elastrata schema`: the JSON Schema of Elastrata's files, and the reference of their keys."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from elastrata.cli.options import Json, local_path
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import write_atomically

Kind = Literal["recipe", "sweep", "cluster"]


def schema(
    kind: Annotated[Kind, typer.Argument(help="Kind of file.")] = "recipe",
    out: Annotated[
        Path | None,
        typer.Option(callback=local_path, help="File to write. Default: standard output."),
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Write a page about every key of all kinds instead.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the JSON Schema of recipes, sweeps or clusters, for an editor."""
    if keys and kind != "recipe":
        raise UserError(f"--keys: not allowed with {kind}: the page has the keys of all kinds")
    schema_of_kind = _load_schema(kind)
    text = _reference_page() if keys else json_text.dumps(schema_of_kind, indent=1) + "\n"
    if out is not None:
        _write_file(out, text)
        console = open_console(as_json=json)
        console.print(f"{'page' if keys else 'schema'}   {out.resolve()}", markup=False)
        if not keys:
            console.print(
                f"next     start a {kind} with this line for completion in editors:\n"
                f"         # yaml-language-server: $schema={out}",
                markup=False,
            )
        if json:
            print_json_line({"path": str(out.resolve())})
    elif json:
        print_json_line(schema_of_kind)
    else:
        # The console would wrap long lines.
        sys.stdout.write(text)


def _load_schema(kind: Kind) -> dict[str, Any]:
    match kind:
        case "recipe":
            from elastrata.recipe.schema import recipe_schema

            return recipe_schema()
        case "sweep":
            from elastrata.sweeps.config import sweep_schema

            return sweep_schema()
        case "cluster":
            from elastrata.planner.cluster import cluster_schema

            return cluster_schema()


def _reference_page() -> str:
    from elastrata.recipe.schema import key_reference

    return key_reference(
        _load_schema("recipe"), sweep=_load_schema("sweep"), cluster=_load_schema("cluster")
    )


def _write_file(out: Path, text: str) -> None:
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise UserError(f"--out: {out}: cannot be written ({error.strerror})") from None
