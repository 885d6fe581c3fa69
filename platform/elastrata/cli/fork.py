"""`elastrata fork`: a new run that goes on from a checkpoint of another one."""

from __future__ import annotations

from typing import Annotated

import typer

from elastrata.cli.options import Address, Json, Overrides
from elastrata.terminal.console import open_console


def fork(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="A run: its folder or URL, or its name in ./runs. Default: its newest checkpoint.",
        ),
    ],
    name: Annotated[str, typer.Option(help="The new run's name.")],
    overrides: Overrides = None,
    address: Address = None,
    json: Json = False,
) -> None:
    """Begin a new run from a checkpoint of another, with changes, and train it."""
    from elastrata.cli.train import train_and_tell
    from elastrata.launch.fork import plan_fork
    from elastrata.run.fork import begin_fork
    from elastrata.terminal.fork_changes import show_changes
    from elastrata.trainer.preflight import check_storage
    from elastrata_pipelines.storage import Storage

    plan = plan_fork(run, name, overrides or [])
    check_storage(Storage(plan.fork.recipe.storage))
    show_changes(open_console(as_json=json), plan)
    begin_fork(plan.fork)
    train_and_tell(plan.fork.recipe, address, json)
