"""`elastrata rehearse`: a recipe's own step on GPUs that are not there."""

from __future__ import annotations

from typing import Annotated

import typer

from elastrata.cli.options import Json, Overrides, Phase, RecipeName
from elastrata.cli.rehearse_report import show_rehearsal
from elastrata.terminal.console import open_console, print_json_line


def rehearse(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: Annotated[
        str, typer.Option(metavar="NxDEVICE|FILE", help="Such as 1024xH100-80GB, or a YAML file.")
    ] = "8xH100-80GB",
    graphs: Annotated[
        bool, typer.Option(help="Rehearse compilation, too, where the recipe compiles.")
    ] = True,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Run a recipe's own step on GPUs that are not there: memory, messages, waits, graphs.

    As one of all ranks of the cluster, on fake tensors; nothing is computed.
    """
    from elastrata.rehearsal.process import Request
    from elastrata.rehearsal.process import rehearse as rehearse_apart

    console = open_console(as_json=json)
    request = Request(
        recipe=recipe,
        overrides=tuple(overrides or []),
        cluster=cluster,
        phase=phase,
        graphs=graphs,
    )
    figures = rehearse_apart(request)
    show_rehearsal(console, figures)
    if json:
        print_json_line(figures)
