"""Progress of a sweep: a table in a terminal or notebook, lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from elastrata.sweeps.journal import Standings
from elastrata.sweeps.plots import headings, html_table, rows, sort_trials
from elastrata.sweeps.space import Domain
from elastrata.terminal.console import LiveBlock
from elastrata_pipelines.errors import pluralize

_ROWS_OF_OTHERS = 8
"""Terminal rows that the table leaves free."""


class SweepProgress(LiveBlock):
    """Context manager that shows the standings of a sweep.

    Args:
        space: search space of the sweep.
        console: console to write to.
    """

    def __init__(self, space: Mapping[str, Domain], console: Console) -> None:
        super().__init__(console)
        self._space = space
        self._reported_trials: set[str] = set()

    def __call__(self, standings: Standings) -> None:
        """Show the present standings."""
        if not self._view.is_live:
            self._write_ended_trials(standings)
            return
        most = max(3, self._console.height - _ROWS_OF_OTHERS)
        table = rich_table(standings, self._space, most)
        self._view.update(table, html_table(standings, self._space))

    def warn(self, line: str) -> None:
        """Show a line."""
        self._write(line)

    def _write_ended_trials(self, standings: Standings) -> None:
        """Write a line for every trial that has ended since the last call."""
        best = standings.best()
        for trial in standings.trials.values():
            if trial.is_over and trial.id not in self._reported_trials:
                self._reported_trials.add(trial.id)
                value = f" {standings.metric} {trial.value(standings.metric):.4f}"
                shown = value if trial.counts else f" {trial.text}"
                mark = ", the best so far" if trial is best else ""
                values = "  ".join(f"{key}={value}" for key, value in trial.values.items())
                self._write(
                    f"trial {trial.id} {trial.state}:{shown} after "
                    f"{pluralize(trial.tokens, 'token')}{mark}  "
                    f"{values}"
                )


def rich_table(standings: Standings, space: Mapping[str, Domain], most: int) -> Table:
    """Return a table of at most `most` trials, the best one marked."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in headings(standings, space):
        table.add_column(name, justify="right", no_wrap=True)
    best = standings.best()
    pairs = list(zip(sort_trials(standings), rows(standings, space), strict=True))
    for trial, cells in pairs[:most]:
        style = "bold" if trial is best else "dim" if trial.is_over and not trial.counts else ""
        table.add_row(*cells, style=style)
    if len(pairs) > most:
        table.caption = f"and {len(pairs) - most} more"
    return table
