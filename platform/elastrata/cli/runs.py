"""`elastrata runs`, `status` and `fork`: how runs stand, and a new run from another one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Address, Json, Overrides, RunName
from elastrata.terminal.console import STATE_STYLES, open_console, print_json_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from elastrata.run.claim import ListedRun
    from elastrata.run.goodput import Goodput
    from elastrata.run.status import Evaluation, Status, TimeBalance
    from elastrata.run.timeline import Recovery


_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def runs(
    storage: Annotated[
        str, typer.Argument(metavar="[STORAGE]", help="Folder or URL where runs are kept.")
    ] = "runs",
    json: Json = False,
) -> None:
    """List the runs in a folder: state, step, loss, workers, and when each gave a sign of life."""
    from elastrata.run.claim import list_runs
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    listed = list_runs(Storage(storage))
    if listed:
        console.print(_table(listed))
    else:
        console.print(f"{Storage(storage).uri()}: no runs here", markup=False)
    for run in listed:
        if run.state is None:
            console.print(f"{run.name}: {run.text}", markup=False, style="red")
        elif run.problems:
            more = f" (and {len(run.problems) - 1} more)" if run.problems[1:] else ""
            console.print(f"{run.name}: {run.problems[0]}{more}", markup=False, style="red")
    if json:
        print_json_line(
            {"storage": Storage(storage).uri(), "runs": [asdict(run) for run in listed]}
        )


def _table(listed: Sequence[ListedRun]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), header_style="bold", pad_edge=False)
    for heading in ("run", "state", "step", "loss", "workers", "seen"):
        table.add_column(heading, justify="left" if heading in ("run", "state") else "right")
    for run in listed:
        state = run.state or "unreadable"
        table.add_row(
            Text(run.name),
            Text(state, style=STATE_STYLES.get(state, "red")),
            f"{run.steps:,}/{run.steps_in_all:,}",
            "" if run.loss is None else f"{run.loss:.4f}",
            str(run.workers or ""),
            "never" if run.seen is None else f"{_age(time.time() - run.seen)} ago",
        )
    return table


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def status(
    run: RunName,
    json: Json = False,
) -> None:
    """Show how a run stands, from its storage alone: progress, faults, and what they cost."""
    from elastrata.run.claim import named_run
    from elastrata.run.status import status as look_at

    console = open_console(as_json=json)
    standing = look_at(named_run(run))
    _show_state(console, standing)
    _show_faults(console, standing)
    _show_recoveries(console, standing)
    if json:
        print_json_line(standing.to_dict())


def _show_state(console: Console, standing: Status) -> None:
    from rich.text import Text

    sizes = ", ".join(
        f"{size.world_size} from step {size.step + 1}" for size in standing.world_sizes
    )
    newest = standing.checkpoint
    rows: dict[str, str | Text] = {
        "run": standing.run,
        "state": Text(standing.text, style=STATE_STYLES[standing.state]),
        "progress": f"step {standing.steps:,} of {standing.steps_in_all:,} "
        f"({standing.progress:.1%}), "
        f"{standing.samples_seen:,} samples, {standing.tokens_seen:,} tokens"
        + (f", loss {standing.loss:.4f}" if standing.loss is not None else ""),
        **({"target": str(standing.target)} if standing.target else {}),
        **({"held out": _evaluation(standing.evaluation)} if standing.evaluation else {}),
        "checkpoint": f"step {newest.step:,}, {newest.uri}" if newest else "none yet",
        "workers": sizes or "none yet",
        **(
            {"spares": f"{standing.spare_bytes / 1e9:.1f} GB of memory in idle processes"}
            if standing.spare_bytes
            else {}
        ),
        **({"times": _balance(standing.time_balance)} if standing.time_balance else {}),
        "lost": f"{_duration(standing.seconds_lost)} of {_duration(standing.seconds_in_all)} "
        f"({standing.share_lost:.1%})",
        "time": _account(standing.goodput),
    }
    for name, value in rows.items():
        console.print(Text.assemble(f"{name:<12}", value))
    for slow in standing.slow_ranks:
        console.print(Text.assemble(("slow        ", "bold yellow"), str(slow)))
    for line in standing.problems:
        console.print(Text.assemble(("damaged     ", "bold red"), line))


def _account(goodput: Goodput) -> str:
    """What a run's time went into, the largest first, but for what is less than a thousandth."""
    seconds, total = goodput.to_metrics(prefix=""), goodput.total
    named = {"steps": "steps that count", "done_again": "steps done again"}
    shares = sorted(((s, name) for name, s in seconds.items() if s > total / 1000), reverse=True)
    parts = (f"{s / total:.1%} {named.get(name, name.replace('_', ' '))}" for s, name in shares)
    return ", ".join(parts) or "none yet"


def _evaluation(newest: Evaluation) -> str:
    """Its loss, and those of sources and of further sets."""
    from elastrata.step.records import losses_by_set, losses_by_source

    others = {**losses_by_source(newest.metrics), **losses_by_set(newest.metrics)}
    told = "".join(f", {name} {loss:.4f}" for name, loss in others.items())
    return f"loss {newest.metrics.get('eval/loss', math.nan):.4f}{told} after step {newest.step:,}"


def _balance(times: TimeBalance) -> str:
    return f"rank {times.slowest_rank} takes longest, {times.imbalance:.3f} of the mean"


def _show_faults(console: Console, standing: Status) -> None:
    from elastrata.run.status import utc

    if standing.faults:
        console.print("\nfaults")
    for fault in standing.faults:
        ranks = f", rank {', '.join(map(str, fault.ranks))}" if fault.ranks else ""
        line = f"  {utc(fault.time)}  attempt {fault.attempt}{ranks}: {fault.text}"
        console.print(line, markup=False)


def _show_recoveries(console: Console, standing: Status) -> None:
    from elastrata.run.status import utc

    if standing.recoveries:
        console.print("\nrecoveries")
    for recovery in standing.recoveries:
        again = _again(recovery)
        workers = f"{recovery.world_size} worker{'s' * (recovery.world_size > 1)}"
        parts = [
            f"{recovery.cause}: {_duration(recovery.seconds)} without a step",
            *([again] if again else []),
            f"on with {workers} from {recovery.state} state (attempt {recovery.attempt})",
        ]
        console.print(f"  {utc(recovery.time)}  {', '.join(parts)}", markup=False)


def _again(recovery: Recovery) -> str:
    """Return what is known of the steps that are done again, and what is not; empty if there are
    none."""
    count, seconds = recovery.steps_rolled_back, f"{recovery.seconds_rolled_back:.1f} s"
    if not recovery.at_least:
        return f"{count:,} steps done again ({seconds})" if count else ""
    unrecorded = recovery.seconds_unrecorded
    unknown = (
        "the last moments before the loss are not recorded"
        if unrecorded is None
        else f"up to {unrecorded:.1f} s before the loss are not recorded"
    )
    return f"at least {count:,} steps done again ({seconds} recorded; {unknown})"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


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
    from elastrata.driver.fork import plan_fork, show_changes
    from elastrata.run.fork import begin_fork
    from elastrata.trainer.preflight import check_storage
    from elastrata_pipelines.storage import Storage

    plan = plan_fork(run, name, overrides or [])
    check_storage(Storage(plan.fork.recipe.storage))
    show_changes(open_console(as_json=json), plan)
    begin_fork(plan.fork)
    train_and_tell(plan.fork.recipe, address, json)
