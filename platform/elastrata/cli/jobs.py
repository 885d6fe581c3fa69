"""`elastrata submit` and `elastrata stop`: jobs on a cluster elsewhere."""

from __future__ import annotations

import json as json_text
import sys
from typing import Annotated

import typer

from elastrata.cli.options import ClusterAddress, Json, Overrides, RecipeName
from elastrata.terminal.console import open_console, print_json_line


def submit(
    recipe: RecipeName,
    cluster: ClusterAddress,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="The run's name. The same name continues the same run.")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Show the job's output until it has ended.")] = True,
    tries: Annotated[
        int, typer.Option(min=0, help="How often to start the driver again where it is killed.")
    ] = 10,
    installed: Annotated[
        bool, typer.Option("--installed", help="Ship no code: use what the cluster has installed.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a recipe on a Ray cluster, as a job; the same run's name continues the run."""
    from elastrata.api import run_name
    from elastrata.deploy import jobs
    from elastrata.deploy.job_server import job_server
    from elastrata.recipe.file import load_recipe
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    renamed = [f"name={json_text.dumps(name)}"] if name is not None else []
    chosen = load_recipe(recipe, [*(overrides or []), *renamed])
    run = run_name(chosen)
    with job_server(cluster) as server:
        job = jobs.submit(server, chosen, name=run, tries=tries, installed=installed)
        folder = Storage(chosen.storage).uri(run)
        lines = [
            f"job {job} trains the run {run}",
            f"  status   elastrata status {folder}",
            f"  stop     elastrata stop {run} --cluster {cluster}",
        ]
        console.print("\n".join(lines), markup=False)
        out = sys.stderr if json else sys.stdout

        def show(text: str) -> None:
            out.write(text)
            out.flush()

        status = jobs.follow(server, job, show) if follow else "SUBMITTED"
    console.print(f"job {job}: {status}", markup=False)
    if json:
        print_json_line({"job": job, "run_dir": folder, "status": status})
    if status == "FAILED":
        raise typer.Exit(1)


def stop(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's name, its URL, or the id of its job.")
    ],
    cluster: ClusterAddress,
    json: Json = False,
) -> None:
    """Stop a submitted run: it saves a checkpoint first; submitting it again continues it."""
    from elastrata.deploy import jobs
    from elastrata.deploy.job_server import job_server

    console = open_console(as_json=json)
    with job_server(cluster) as server:
        ended = jobs.stop(server, run)
    for job, status in ended.items():
        console.print(f"job {job}: {status}", markup=False)
    if json:
        print_json_line({"jobs": ended})
