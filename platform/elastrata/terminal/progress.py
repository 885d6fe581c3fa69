"""Progress of a run, and of work in stages: a live view on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import override

from elastrata.step.events import (
    Chosen,
    Committed,
    Evaluated,
    Event,
    Halted,
    Launched,
    Lost,
    Paced,
    RanOut,
    Slowed,
    Started,
    Substituted,
    Warned,
)
from elastrata.step.records import StepRecord
from elastrata.terminal.console import LiveBlock
from elastrata_pipelines.speeds import FULL_SPEED

if TYPE_CHECKING:
    from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import pluralize

_SHOWN_SECONDS = 0.1
"""Shortest duration of a stage that is shown."""
_UNITS = (("G", 10**9), ("M", 10**6), ("k", 10**3))


class StageProgress(LiveBlock):
    """Context manager that shows the progress of long work in several stages.

    Args:
        console: console to write to.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bars = Bars(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
        )
        self._stage = ""
        self._task: TaskID | None = None
        # End of the previous stage: the first report of a stage comes only with its first result.
        self._started_at = time.monotonic()
        self._finished = True

    @override
    def __enter__(self) -> Self:
        self._started_at = time.monotonic()
        return super().__enter__()

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # The live display is transient: print its last state.
        if self._view.is_live and not self._view.stays:
            self._console.print(self._bars.get_renderable())

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        """Update the progress of a stage; a new name begins a new stage."""
        amount = f"{format_count(done)}/{format_amount(total, unit)}"
        if stage != self._stage:
            self._begin_stage(stage)
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total or None, amount=amount)
            self._view.update(self._bars.get_renderable())
        if done >= total and not self._finished:
            self._finished = True
            if self._task is None:
                seconds = time.monotonic() - self._started_at
                took = f" in {seconds:.1f} s" if seconds >= _SHOWN_SECONDS else ""
                self._write(f"{stage}: {format_amount(done, unit)}{took}")
            self._started_at = time.monotonic()

    def _begin_stage(self, stage: str) -> None:
        self._stage, self._finished = stage, False
        if self._view.is_live:
            self._task = self._bars.add_task(stage, amount="")


def format_amount(amount: int, unit: str) -> str:
    """Format an amount with its unit: `1 tokenizer`, `24.7 MB`."""
    if unit == "bytes":
        size, letter = next(((s, name) for name, s in _UNITS if amount >= s), (1, ""))
        return f"{amount / size:.3g} {letter}B"
    return f"{format_count(amount)} {unit.removesuffix('s') if amount == 1 else unit}"


def format_count(amount: float) -> str:
    """Format a count with three digits: `1.25M`."""
    for letter, size in _UNITS:
        if amount >= size:
            return f"{amount / size:.3g}{letter}"
    return f"{amount:.3g}"


_LINE_SECONDS = 5.0
_MOST_SPEEDS = 8
"""Most speeds that a line shows."""
_VIEW_SECONDS = 0.25
_ETA_STEPS = 50
_WARN_STEPS = 5
"""Steps of a group of workers after which the length of the run is estimated."""
_DAY = 86_400
_LONG_SECONDS = 30 * _DAY
_BAR_COLUMNS = 20
_TIERS = {"hot": "in-memory checkpoint", "durable": "stored checkpoint"}


class Progress(LiveBlock):
    """Context manager that shows a run's events as lines, and its steps in a live view, or as a
    line every few seconds if output is neither a terminal nor a notebook.

    Args:
        steps: steps of the whole run.
        console: console to write to.
        begins: line to show at a step, by its number.
        indent: prefix of every line.
    """

    def __init__(
        self,
        steps: int,
        console: Console,
        begins: Mapping[int, str] | None = None,
        indent: str = "",
    ) -> None:
        super().__init__(console)
        self._steps = steps
        self._begins = begins or {}
        self._indent = indent
        self._shown_at = 0.0
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)
        self._step = self._workers = self._saved = 0
        self._last: StepRecord | None = None
        self._is_long = False

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, StepRecord):
            self._update(event)
            return
        if line := _describe(event, self._step):
            self._write(line)
        match event:
            case Started():
                self._workers = event.world_size
                # A group of another size has another pace.
                self._recent.clear()
                self._last = None
            case Committed():
                self._saved = event.step
                if self._last is not None:
                    self._view.update(self._live_line(self._last))

    @override
    def _write(self, line: str) -> None:
        super()._write(f"{self._indent}{line}")

    def _update(self, record: StepRecord) -> None:
        """Update the view from a step record, at most every `_VIEW_SECONDS` or `_LINE_SECONDS`."""
        self._recent.append(record.seconds)
        self._step, self._last = record.step, record
        if record.step in self._begins:
            self._write(self._begins[record.step])
        self._warn_of_length()
        now, interval = time.monotonic(), _VIEW_SECONDS if self._view.is_live else _LINE_SECONDS
        # Steps are more frequent than a reader can follow; the first and the last one are always
        # shown.
        if now - self._shown_at < interval and record.step not in (1, self._steps):
            return
        self._shown_at = now
        if self._view.is_live:
            self._view.update(self._live_line(record))
        if not self._view.is_live or record.step == self._steps:
            self._write(self._step_line(record))

    def _warn_of_length(self) -> None:
        """Warn once if the run would take more than 30 days."""
        if not self._is_long and len(self._recent) == _WARN_STEPS and self._eta > _LONG_SECONDS:
            self._is_long = True
            self._write(
                f"warning: {pluralize(self._steps - self._step, 'step')} are left, which take "
                f"{self._eta / _DAY:,.0f} days at this pace; fewer steps (epochs=3, say), more "
                "workers or a smaller model take less"
            )

    @property
    def _eta(self) -> float:
        """Seconds to the last step, at the pace of the last `_ETA_STEPS` steps."""
        return (self._steps - self._step) * sum(self._recent) / len(self._recent)

    def _live_line(self, record: StepRecord) -> Table:
        """Return the line of the live view."""
        grid = Table.grid(padding=(0, 2))
        saved = f"checkpoint {self._saved}" if self._saved else "no checkpoint yet"
        grid.add_row(
            f"{self._indent}step {record.step}/{self._steps}",
            ProgressBar(total=self._steps, completed=record.step, width=_BAR_COLUMNS),
            f"loss {record.loss:.4f}",
            f"{format_count(record.tokens_per_second)} tokens/s",
            f"ETA {_format_duration(self._eta)}",
            format_amount(self._workers, "workers"),
            saved,
        )
        return grid

    def _step_line(self, record: StepRecord) -> str:
        parts = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record.loss:7.4f}",
            *(f"{name} {loss:.3f}" for name, loss in _top_three(record)),
            f"lr {record.lr:.2e}",
            f"grad {record.gradient_norm:6.3f}",
            f"{format_count(record.tokens_per_second)} tokens/s",
            f"padding {record.padding:.1%}",
            f"imbalance {record.imbalance:.3f}",
            f"data wait {record.seconds_waiting_for_data / record.seconds:.0%}",
        ]
        if record.mfu is not None:
            parts.append(f"MFU {record.mfu:.1%}")
        if record.bubble is not None:
            memory = "/".join(f"{size / 2**30:.1f}" for size in record.memory_by_stage)
            parts += [f"bubble {record.bubble:.1%}", f"memory {memory} GiB"]
        return "  ".join([*parts, f"ETA {_format_duration(self._eta)}"])


def _top_three(record: StepRecord) -> list[tuple[str, float]]:
    """Return the losses of the three sources with most tokens in the step."""
    return list(record.losses_by_source.items())[:3]


def phase_lines(recipe: Recipe) -> dict[int, str]:
    """Return a line about each phase, by its first step."""
    first = accumulate((phase.num_steps for phase in recipe.phases), initial=1)
    return {
        step: f"phase {number} of {len(recipe.phases)}: {phase.name or phase.data.title}"
        for number, (step, phase) in enumerate(zip(first, recipe.phases, strict=False), start=1)
    }


def _describe(event: Event, step: int) -> str | None:
    """Return a line about an event, or None. `step` is the last step before it."""
    match event:
        case Launched() if event.chosen:
            return event.chosen
        case Started():
            since = f" from step {event.step} ({_TIERS[event.state]})" if event.step else ""
            again = (
                f", repeating at least {pluralize(step - event.step, 'step')}"
                if step > event.step
                else ""
            )
            stayed = f", of which {event.stayed} kept running," if event.stayed else ""
            count = f"{pluralize(event.world_size, 'worker')}{stayed}"
            return f"training on {count}{since}{again} (attempt {event.attempt})"
        case Evaluated():
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            return f"evaluation after step {event.step}: loss {event.loss:.4f}  {metrics}"
        case Committed():
            return f"checkpoint of step {event.step}: {event.uri}"
        case Halted():
            return f"saved after step {event.step} for a {event.reason}: {event.text}"
        case Lost():
            return f"lost workers: {event.text}; resuming from the newest state"
        case Substituted():
            return f"unavailable here: {event.text}"
        case Chosen():
            is_each = event.gradient_sync != "step"
            synced = f", gradient_sync {event.gradient_sync}" if is_each else ""
            return (
                f"from step {event.step} on: micro_batch_tokens {_format_tokens(event)}, "
                f"activation_checkpointing {event.activation_checkpointing}{synced} ({event.text})"
            )
        case RanOut():
            return f"{event.text}; using smaller micro-batches"
        case Warned():
            return f"warning: {event.text}"
        case Slowed():
            return f"note: {event.text}" if event.is_over else f"warning: {event.text}"
        case Paced():
            speeds = ", ".join(f"{speed / FULL_SPEED:.2f}" for speed in event.speeds[:_MOST_SPEEDS])
            more = ", ..." if len(event.speeds) > _MOST_SPEEDS else ""
            return f"after step {event.step}: new speeds of workers apply soon: {speeds}{more}"
        case _:
            return None


def _format_tokens(event: Chosen) -> str:
    """Format the tokens per micro-batch of all kinds of workers."""
    each = event.micro_batch_tokens_by_kind or {"": event.micro_batch_tokens}
    return ", ".join(f"{tokens:,} {kind}".strip() for kind, tokens in each.items())


def _format_duration(seconds: float) -> str:
    """Format a duration: `2h05m`, `3m20s`, `7s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
