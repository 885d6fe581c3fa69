"""Progress by stages: bars on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from typing_extensions import override

from elastrata.terminal.live_view import ShownLive

_SHOWN_SECONDS = 0.1
"""Stages that took less are over when they are first heard of."""
_UNITS = (("G", 10**9), ("M", 10**6), ("k", 10**3))


class StageProgress(ShownLive):
    """Shows how far a long work of several stages is; a context manager.

    Args:
        console: where to show it.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bars = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
        )
        self._stage = ""
        self._task: TaskID | None = None
        # when the stage before ended: the first report of a stage comes with its first result
        self._begun = time.monotonic()
        self._finished = True

    @override
    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        return super().__enter__()

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._view.is_live and not self._view.stays:
            self._console.print(self._bars.get_renderable())

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        """Takes how much of a stage is done; a new name begins a new stage."""
        amount = f"{quantity(done)}/{counted(total, unit)}"
        if stage != self._stage:
            self._begin(stage)
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total or None, amount=amount)
            self._view.update(self._bars.get_renderable())
        if done >= total and not self._finished:
            self._finished = True
            if self._task is None:
                seconds = time.monotonic() - self._begun
                took = f" in {seconds:.1f} s" if seconds >= _SHOWN_SECONDS else ""
                self._write(f"{stage}: {counted(done, unit)}{took}")
            self._begun = time.monotonic()

    def _begin(self, stage: str) -> None:
        self._stage, self._finished = stage, False
        if self._view.is_live:
            self._task = self._bars.add_task(stage, amount="")


def counted(amount: int, unit: str) -> str:
    """An amount with its unit: `1 tokenizer`, `24.7 MB`."""
    if unit == "bytes":
        size, letter = next(((s, name) for name, s in _UNITS if amount >= s), (1, ""))
        return f"{amount / size:.3g} {letter}B"
    return f"{quantity(amount)} {unit.removesuffix('s') if amount == 1 else unit}"


def quantity(amount: float) -> str:
    """A count in three digits: `1.25M`."""
    for letter, size in _UNITS:
        if amount >= size:
            return f"{amount / size:.3g}{letter}"
    return f"{amount:.3g}"
