"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata_pipelines.errors import UserError, pluralize

if TYPE_CHECKING:
    from elastrata.recipe.recipe import PhaseKeys, Recipe

MOST_WORKERS = 65_536

Json = Annotated[
    bool, typer.Option("--json", help="End with one JSON object as the last line of output.")
]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe's file, or a name such as bert/tiny.")
]
OptionalRecipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="A recipe's file, or a name such as bert/tiny."),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder or URL of a run, or its name in ./runs.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides of recipe keys, such as optimizer.lr=3e-4."
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to join: auto, or an address. Default: start one on this machine."
    ),
]
ClusterAddress = Annotated[
    str,
    typer.Option(
        metavar="NAME|ADDRESS",
        help="Address of the cluster's dashboard (http://HOST:8265), auto, or the file or name of "
        "a cluster started by `ray up`.",
    ),
]
OptionalClusterAddress = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|ADDRESS",
        help="Cluster that runs it as a job, as for `submit`. Default: a process of this machine.",
    ),
]
Phase = Annotated[
    int, typer.Option(min=0, help="Phase to look at, counted from 0, if the recipe has phases.")
]
Workers = Annotated[str, typer.Option(metavar="N[,N]...", help="Numbers of data-parallel workers.")]


def local_path(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a URL for an option that names a local file or folder.

    Raises:
        UserError: the value is a URL.
    """
    from elastrata.run.claim import check_local

    if value is not None:
        check_local(value, f"--{param.name}")
    return value


def parse_workers(text: str) -> list[int]:
    """Return the numbers in a `Workers` option, without repetitions.

    Raises:
        UserError: a part is no number, or is too large.
    """
    # 0 marks a part that is no number; it is refused below.
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= number <= MOST_WORKERS for number in numbers):
        raise UserError(
            f"--workers: {text}: expected numbers from 1 to {MOST_WORKERS:,}, such as 8 or 1,8,64"
        )
    return list(dict.fromkeys(numbers))


def select_phase(recipe: Recipe, phase: int) -> PhaseKeys:
    """Return the phase that a `Phase` option selects.

    Raises:
        UserError: the recipe has no such phase.
    """
    if phase >= len(recipe.parts):
        raise UserError(
            f"--phase: {phase}: the recipe has {pluralize(len(recipe.parts), 'phase')}, "
            "counted from 0"
        )
    return recipe.parts[phase]
