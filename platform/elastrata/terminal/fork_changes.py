"""The table of what a fork has otherwise than its parent."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from elastrata.launch.fork import ForkPlan


def show_changes(console: Console, plan: ForkPlan) -> None:
    """Shows of which checkpoint the fork is, and what changes."""
    fork = plan.fork
    console.print(f"fork of {fork.parent.uri()}, step {fork.commit.step}", markup=False)
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("what changes", "from", "to"):
        table.add_column(heading, overflow="fold")
    for change in plan.changes:
        table.add_row(change.what, change.before, change.after)
    if plan.changes:
        console.print(table)
