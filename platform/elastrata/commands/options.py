"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[
    bool, typer.Option("--json", help="End with one JSON object as the last line of output.")
]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe's file, or a name such as bert/tiny.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as optimizer.lr=3e-4."),
]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster to join: auto or its address. Default: one of its own, here."),
]
