"""`elastrata runs`, `status` and `fork`: the state of runs, and a new run from another one."""

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
from elastrata_pipelines.errors import pluralize

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def runs(
    storage: Annotated[
        str, typer.Argument(metavar="[STORAGE]", help="Folder or URL that contains runs.")
    ] = "runs",
    json: Json = False,
) -> None:
    """List the runs in a folder: state, step, loss, workers, and when each was last active."""
    from elastrata.run.claim import list_runs
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    listed = list_runs(Storage(storage))
    if listed:
        console.print(_build_table(listed))
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


def _build_table(listed: Sequence[ListedRun]) -> Table:
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
            "never" if run.seen is None else f"{_format_age(time.time() - run.seen)} ago",
        )
    return table


def _format_age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def status(
    run: RunName,
    json: Json = False,
) -> None:
    """Show the progress, faults and recoveries of a run, from its storage alone."""
    from elastrata.run.claim import find_run_folder
    from elastrata.run.status import status as look_at

    console = open_console(as_json=json)
    run_status = look_at(find_run_folder(run))
    _show_state(console, run_status)
    _show_faults(console, run_status)
    _show_recoveries(console, run_status)
    if json:
        print_json_line(run_status.to_dict())


def _show_state(console: Console, run_status: Status) -> None:
    from rich.text import Text

    sizes = ", ".join(
        f"{size.world_size} from step {size.step + 1}" for size in run_status.world_sizes
    )
    newest = run_status.checkpoint
    rows: dict[str, str | Text] = {
        "run": run_status.run,
        "state": Text(run_status.text, style=STATE_STYLES[run_status.state]),
        "progress": f"step {run_status.steps:,} of {run_status.steps_in_all:,} "
        f"({run_status.progress:.1%}), "
        f"{pluralize(run_status.samples_seen, 'sample')}, "
        f"{pluralize(run_status.tokens_seen, 'token')}"
        + (f", loss {run_status.loss:.4f}" if run_status.loss is not None else ""),
        **({"target": str(run_status.target)} if run_status.target else {}),
        **(
            {"held out": _format_evaluation(run_status.evaluation)} if run_status.evaluation else {}
        ),
        "checkpoint": f"step {newest.step:,}, {newest.uri}" if newest else "none yet",
        "workers": sizes or "none yet",
        **(
            {"spares": f"{run_status.spare_bytes / 1e9:.1f} GB of memory in idle processes"}
            if run_status.spare_bytes
            else {}
        ),
        **({"times": _format_balance(run_status.time_balance)} if run_status.time_balance else {}),
        "lost": f"{_format_duration(run_status.seconds_lost)} of "
        f"{_format_duration(run_status.seconds_in_all)} "
        f"({run_status.share_lost:.1%})",
        "time": _format_time_shares(run_status.goodput),
    }
    for name, value in rows.items():
        console.print(Text.assemble(f"{name:<12}", value))
    for slow in run_status.slow_ranks:
        console.print(Text.assemble(("slow        ", "bold yellow"), str(slow)))
    for line in run_status.problems:
        console.print(Text.assemble(("damaged     ", "bold red"), line))


def _format_time_shares(goodput: Goodput) -> str:
    """Return the shares of a run's time, the largest first, without those below a thousandth."""
    seconds, total = goodput.to_metrics(prefix=""), goodput.total
    names = {"steps": "productive steps", "done_again": "repeated steps"}
    shares = sorted(((s, name) for name, s in seconds.items() if s > total / 1000), reverse=True)
    parts = (f"{s / total:.1%} {names.get(name, name.replace('_', ' '))}" for s, name in shares)
    return ", ".join(parts) or "none yet"


def _format_evaluation(newest: Evaluation) -> str:
    """Return the loss of an evaluation, and the losses of sources and of further sets."""
    from elastrata.step.records import losses_by_set, losses_by_source

    losses = {**losses_by_source(newest.metrics), **losses_by_set(newest.metrics)}
    other_losses = "".join(f", {name} {loss:.4f}" for name, loss in losses.items())
    return (
        f"loss {newest.metrics.get('eval/loss', math.nan):.4f}{other_losses} "
        f"after step {newest.step:,}"
    )


def _format_balance(times: TimeBalance) -> str:
    return f"rank {times.slowest_rank} is the slowest, at {times.imbalance:.3f} times the mean"


def _show_faults(console: Console, run_status: Status) -> None:
    from elastrata.run.status import utc

    if run_status.faults:
        console.print("\nfaults")
    for fault in run_status.faults:
        ranks = f", rank {', '.join(map(str, fault.ranks))}" if fault.ranks else ""
        line = f"  {utc(fault.time)}  attempt {fault.attempt}{ranks}: {fault.text}"
        console.print(line, markup=False)


def _show_recoveries(console: Console, run_status: Status) -> None:
    from elastrata.run.status import utc

    if run_status.recoveries:
        console.print("\nrecoveries")
    for recovery in run_status.recoveries:
        repeated = _format_repeated(recovery)
        workers = pluralize(recovery.world_size, "worker")
        parts = [
            f"{recovery.cause}: {_format_duration(recovery.seconds)} without a step",
            *([repeated] if repeated else []),
            f"resumed with {workers} from {recovery.state} state (attempt {recovery.attempt})",
        ]
        console.print(f"  {utc(recovery.time)}  {', '.join(parts)}", markup=False)


def _format_repeated(recovery: Recovery) -> str:
    """Return how many steps are repeated and how many may be unrecorded; empty without any."""
    count, seconds = recovery.steps_rolled_back, f"{recovery.seconds_rolled_back:.1f} s"
    if not recovery.at_least:
        return f"{pluralize(count, 'step')} repeated ({seconds})" if count else ""
    # The history of the last moments before a loss may have been lost with its worker.
    unrecorded = recovery.seconds_unrecorded
    unrecorded_text = (
        "the last moments before the loss are not recorded"
        if unrecorded is None
        else f"up to {unrecorded:.1f} s before the loss are not recorded"
    )
    return f"at least {pluralize(count, 'step')} repeated ({seconds} recorded; {unrecorded_text})"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def fork(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="Folder or URL of a run, or its name in ./runs. Default step: the newest saved.",
        ),
    ],
    name: Annotated[str, typer.Option(help="The new run's name.")],
    overrides: Overrides = None,
    address: Address = None,
    json: Json = False,
) -> None:
    """Start a new run from a checkpoint of another one, with changes, and train it."""
    from elastrata.cli.train import train_and_show
    from elastrata.driver.fork import plan_fork, show_changes
    from elastrata.run.fork import begin_fork
    from elastrata.trainer.preflight import check_storage
    from elastrata_pipelines.storage import Storage

    plan = plan_fork(run, name, overrides or [])
    # Storage is checked before anything is written, so that a failed fork leaves no run.
    check_storage(Storage(plan.fork.recipe.storage))
    show_changes(open_console(as_json=json), plan)
    begin_fork(plan.fork)
    train_and_show(plan.fork.recipe, address, json)
