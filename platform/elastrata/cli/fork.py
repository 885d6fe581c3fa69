"""`elastrata fork`: a new run that goes on from a checkpoint of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Address, Json, Overrides
from elastrata.terminal.console import open_console

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.launch.fork import ForkPlan


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
    from elastrata.trainer.preflight import check_storage
    from elastrata_pipelines.storage import Storage

    plan = plan_fork(run, name, overrides or [])
    check_storage(Storage(plan.fork.recipe.storage))
    _show(open_console(as_json=json), plan)
    begin_fork(plan.fork)
    train_and_tell(plan.fork.recipe, address, json)


def _show(console: Console, plan: ForkPlan) -> None:
    from rich.table import Table

    fork = plan.fork
    console.print(f"fork of {fork.parent.uri()}, step {fork.commit.step}", markup=False)
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("what changes", "from", "to"):
        table.add_column(heading, overflow="fold")
    for change in plan.changes:
        table.add_row(change.what, change.before, change.after)
    if plan.changes:
        console.print(table)
