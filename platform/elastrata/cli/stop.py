"""`elastrata stop`: ends the job that trains a run, with the run's state saved."""

from __future__ import annotations

from typing import Annotated

import typer

from elastrata.cli.options import ClusterAddress, Json
from elastrata.terminal.console import open_console, print_json_line


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
