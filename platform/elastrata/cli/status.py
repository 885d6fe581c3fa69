"""`elastrata status`: how a run stands, wherever it runs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from elastrata.cli.options import Json, RunName
from elastrata.terminal.console import STATE_STYLES, open_console, print_json_line

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.run.status import Status


_CHAINS = {
    "whole": "whole: every part of the history goes on after the one before it",
    "none": "none: the history was written by an earlier version",
    "broken": "broken: the history is not as it was written",
}


def status(
    run: RunName,
    json: Json = False,
) -> None:
    """Show how a run stands, from its storage alone: progress, faults, and what they cost."""
    from elastrata.run.names import named_run
    from elastrata.run.status import status as look_at

    console = open_console(as_json=json)
    found = look_at(named_run(run))
    _show_state(console, found)
    _show_faults(console, found)
    _show_recoveries(console, found)
    if json:
        print_json_line(found.to_dict())


def _show_state(console: Console, found: Status) -> None:
    from rich.text import Text

    sizes = ", ".join(f"{size.world_size} from step {size.step + 1}" for size in found.world_sizes)
    newest = found.checkpoint
    rows: dict[str, str | Text] = {
        "run": found.run,
        "state": Text(found.text, style=STATE_STYLES[found.state]),
        "progress": f"step {found.steps:,} of {found.steps_in_all:,} ({found.progress:.1%}), "
        f"{found.samples_seen:,} samples, {found.tokens_seen:,} tokens"
        + (f", loss {found.loss:.4f}" if found.loss is not None else ""),
        **({"target": str(found.target)} if found.target else {}),
        "checkpoint": f"step {newest.step:,}, {newest.uri}" if newest else "none yet",
        "workers": sizes or "none yet",
        "lost": f"{_duration(found.seconds_lost)} of {_duration(found.seconds_in_all)} "
        f"({found.share_lost:.1%})",
        "chain": Text(_CHAINS[found.chain], style="bold red" if found.chain == "broken" else ""),
    }
    for name, value in rows.items():
        console.print(Text.assemble(f"{name:<12}", value))
    for line in found.problems:
        console.print(Text.assemble(("altered     ", "bold red"), line))


def _show_faults(console: Console, found: Status) -> None:
    from elastrata.run.state import utc

    if found.faults:
        console.print("\nfaults")
    for fault in found.faults:
        ranks = f", rank {', '.join(map(str, fault.ranks))}" if fault.ranks else ""
        line = f"  {utc(fault.time)}  attempt {fault.attempt}{ranks}: {fault.text}"
        console.print(line, markup=False)


def _show_recoveries(console: Console, found: Status) -> None:
    from elastrata.run.state import utc

    if found.recoveries:
        console.print("\nrecoveries")
    for one in found.recoveries:
        again = f"{one.steps_rolled_back:,} steps done again ({one.seconds_rolled_back:.1f} s)"
        workers = f"{one.world_size} worker{'s' * (one.world_size > 1)}"
        parts = [
            f"{one.cause}: {_duration(one.seconds)} without a step",
            *([again] if one.steps_rolled_back else []),
            f"on with {workers} from {one.state} state (attempt {one.attempt})",
        ]
        console.print(f"  {utc(one.time)}  {', '.join(parts)}", markup=False)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
