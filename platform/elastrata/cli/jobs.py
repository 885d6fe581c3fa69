"""`elastrata submit`, `stop` and `guard`: jobs on another cluster, and its spot machines."""

from __future__ import annotations

import json as json_text
import signal
import sys
import time
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import (
    ClusterAddress,
    Json,
    OptionalClusterAddress,
    Overrides,
    RecipeName,
)
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, format_command, suggest_nearest

if TYPE_CHECKING:
    from rich.console import Console


def submit(
    recipe: RecipeName,
    cluster: ClusterAddress,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run. An existing run is continued.")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Show the job's output until it ends.")] = True,
    tries: Annotated[
        int, typer.Option(min=0, help="How often to restart the driver if it is killed.")
    ] = 10,
    installed: Annotated[
        bool,
        typer.Option(
            "--installed", help="Upload no code: use the version installed on the cluster."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Train a recipe on a Ray cluster, as a job."""
    from elastrata.api import run_name
    from elastrata.deploy import jobs
    from elastrata.recipe.file import load_recipe
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    name_override = [f"name={json_text.dumps(name)}"] if name is not None else []
    loaded = load_recipe(recipe, [*(overrides or []), *name_override])
    run = run_name(loaded)
    with jobs.connect_to_job_server(cluster) as server:
        job = jobs.submit(server, loaded, name=run, tries=tries, installed=installed)
        folder = Storage(loaded.storage).uri(run)
        lines = [
            f"job {job} trains the run {run}",
            f"  status   {format_command('elastrata', 'status', folder)}",
            f"  stop     {format_command('elastrata', 'stop', run, '--cluster', cluster)}",
        ]
        console.print("\n".join(lines), markup=False)
        # With --json the last line of standard output is the JSON object.
        out = sys.stderr if json else sys.stdout

        def show(text: str) -> None:
            out.write(text)
            out.flush()

        status = jobs.follow(server, job, show) if follow else "SUBMITTED"
    console.print(f"job {job}: {status}", markup=False)
    if json:
        print_json_line({"job": job, "run_dir": folder, "status": status})
    # A stopped job is no failure of this command.
    if status == "FAILED":
        raise typer.Exit(1)


def stop(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Name, folder or URL of a run, or the id of its job."),
    ],
    cluster: OptionalClusterAddress = None,
    json: Json = False,
) -> None:
    """Stop a run after it has saved a checkpoint. The command that began it continues it."""
    console = open_console(as_json=json)
    if cluster is None:
        _stop_here(console, run, json=json)
        return
    from elastrata.deploy import jobs

    with jobs.connect_to_job_server(cluster) as server:
        statuses = jobs.stop(server, run)
    for job, status in statuses.items():
        console.print(f"job {job}: {status}", markup=False)
    if json:
        print_json_line({"jobs": statuses})


def _stop_here(console: Console, run: str, *, json: bool) -> None:
    """Stop a run or a sweep that a process of this machine drives."""
    from elastrata.run.claim import find_driven_folder
    from elastrata.run.folder import RUN_FILE
    from elastrata.run.ownership import stop_driver
    from elastrata.run.status import status

    folder = find_driven_folder(run)
    stop_driver(folder, lambda line: console.print(line, markup=False))
    ended = status(folder) if folder.exists(RUN_FILE) else None
    console.print(f"{folder.uri()}: {ended.text if ended else 'stopped'}", markup=False)
    if json:
        print_json_line({"run": folder.uri(), "state": ended.state if ended else "stopped"})


def guard(
    cloud: Annotated[
        str | None,
        typer.Option(help="Cloud whose preemption notices to wait for: aws, gcp or azure."),
    ] = None,
    now: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Drain the node now: the machine stops in this many seconds. For preStop hooks.",
        ),
    ] = None,
    on_sigterm: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Treat SIGTERM as a notice this many seconds ahead; 0: exit without draining.",
        ),
    ] = 0.0,
    every: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Interval between requests for notices."),
    ] = 2.0,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster. Default: the one that this machine belongs to.")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="Id of the Ray node. Default: all nodes with this machine's address."),
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help="URL of the metadata server. Default: the cloud's.")
    ] = None,
) -> None:
    """Wait for a preemption notice for this machine, then drain its Ray node."""
    from elastrata.deploy.preemption import (
        CLOUDS,
        Notice,
        drain,
        wait_for_notice,
        wait_until_gone,
    )

    if cloud is not None and cloud not in CLOUDS:
        expected = f"expected one of {', '.join(CLOUDS)}"
        raise UserError(f"--cloud: {cloud}: {expected}{suggest_nearest(cloud, CLOUDS)}")
    if cloud is None and now is None and not on_sigterm:
        raise UserError("expected --cloud, --on-sigterm or --now")
    stop_event = Event()
    # The default action of SIGTERM would end this process before the drain.
    signal.signal(signal.SIGTERM, lambda number, frame: stop_event.set())
    notice = None
    if now is not None:
        notice = Notice("this machine is to be stopped", time.time() + now)
    elif cloud is not None:
        ask, url = CLOUDS[cloud]
        _log(f"waiting for a notice from {cloud}")
        notice = wait_for_notice(
            ask((metadata or url).rstrip("/")), stop_event, seconds_between=every, say=_log
        )
    else:
        _log("waiting for SIGTERM")
        stop_event.wait()
    is_waiting = now is not None
    if notice is None and on_sigterm:
        notice = Notice("SIGTERM", time.time() + on_sigterm)
        # After SIGTERM the machine waits for this process before it stops.
        is_waiting = True
    if notice is None:
        return
    nodes = drain(notice, address=address, node_id=node, say=_log)
    # The exit code lets a preStop hook or a service see that no node was drained.
    if not nodes:
        raise typer.Exit(1)
    if is_waiting:  # the machine is stopped once this process exits
        is_gone = wait_until_gone(nodes, notice.time)
        _log("the node has left" if is_gone else "the time is up, but the node has not left")


def _log(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}\n")
    sys.stderr.flush()
