"""Jobs that train a run on another cluster: submitted, followed, stopped; and their server."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from elastrata.deploy.clusters import find_cluster_file, is_launched
from elastrata.recipe.file import to_yaml
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import NO_SECRET, without_secrets

RUN = "elastrata_run"
"""The key of a job's metadata that holds its run's URL."""
_SECONDS_BETWEEN_LOOKS = 0.5
_TRIES_TO_FOLLOW = 60
RECIPE = "recipe.yaml"
"""The recipe in the job's working directory, whole: with all that it extends."""
_PACKAGES = ("elastrata", "elastrata_pipelines", "elastrata_workloads")
_STOP_SECONDS = 60
"""After the checkpoint of a stopped run, for its record and its workers' end."""
_PORT = 8265
_SECONDS_FOR_A_TUNNEL = 60.0
_OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that Ray's client would follow rather than the address it is given."""
_NOISY_LOGGERS = ("ray.dashboard", "ray._private.runtime_env", "ray._common")
"""They tell of every package and connection."""

_NO_AGENT = "Failed to get head node agent"
"""In what a server answers that has nobody to start jobs."""


def submit(
    server: JobSubmissionClient, recipe: Recipe, *, name: str, tries: int, installed: bool
) -> str:
    """Submits a job that trains a recipe, or continues its run; returns the job's id.

    Args:
        server: of the cluster.
        recipe: what to train.
        name: of the run.
        tries: how often the job may start its driver again where that was killed.
        installed: whether to use the Elastrata that the cluster has, and to ship none.

    Raises:
        UserError: a job trains that run already, the recipe names folders of this machine, or the
            server cannot start jobs.
    """
    if problems := list(local_paths(recipe)):
        raise UserError(*problems)
    run = Storage(recipe.storage).uri(name)
    for job in living(server, run):
        raise UserError(
            f"name: {name}: the job {job.submission_id} trains that run already; `elastrata stop` "
            "ends it, with its state saved"
        )
    command = ["python3", "-m", "elastrata.deploy.job_entrypoint", version("elastrata"), str(tries)]
    with tempfile.TemporaryDirectory() as folder, answering(server):
        (Path(folder) / RECIPE).write_text(to_yaml(recipe), encoding="utf-8")
        return server.submit_job(
            entrypoint=shlex.join([*command, RECIPE, "--name", name]),
            submission_id=f"{name}-{uuid.uuid4().hex[:8]}",
            runtime_env=runtime_env(recipe, Path(folder), with_packages=not installed),
            metadata={RUN: run},
        )


def living(server: JobSubmissionClient, wanted: str) -> list[JobDetails]:
    """The jobs that have not ended: of a run, by its URL or name, or with this id."""
    with answering(server):
        jobs = server.list_jobs()
    return [
        job
        for job in jobs
        if not job.status.is_terminal()
        and wanted in _names(job.submission_id or "", (job.metadata or {}).get(RUN, ""))
    ]


def _names(job: str, run: str) -> Sequence[str]:
    """The names that people may use for a job."""
    return [job, run, run.rsplit("/", 1)[-1]] if run else [job]


def follow(server: JobSubmissionClient, job: str, show: Callable[[str], None]) -> str:
    """Shows a job's output as it comes, to its end; returns its status then.

    A connection that breaks is made again, and goes on where it was.

    Raises:
        ConnectionError: the server is gone for good.
    """
    output = _Output(show)
    failures = 0
    while failures < _TRIES_TO_FOLLOW:
        before = output.shown
        try:
            asyncio.run(output.tail(server, job))
            if server.get_job_status(job).is_terminal():
                return str(server.get_job_status(job))
        except (OSError, RuntimeError, aiohttp.ClientError):
            failures = 0 if output.shown > before else failures + 1
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise ConnectionError(f"the job server is gone; the job {job} may run on")


class _Output:
    """The output of a job, as far as it has been shown."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.shown = 0
        """Characters."""
        self._show = show

    async def tail(self, server: JobSubmissionClient, job: str) -> None:
        """Shows what comes after that. The server sends all from the start."""
        seen = 0
        async for text in server.tail_job_logs(job):
            fresh = text[max(0, self.shown - seen) :]
            seen += len(text)
            self.shown = max(self.shown, seen)
            if fresh:
                self._show(fresh)


def stop(server: JobSubmissionClient, wanted: str) -> dict[str, str]:
    """Stops the jobs of a run, which save first, and waits until they have ended.

    Args:
        server: of the cluster.
        wanted: the run's name or URL, or the id of a job.

    Returns:
        The status of each job.

    Raises:
        UserError: no such job is running.
    """
    jobs = [str(job.submission_id) for job in living(server, wanted)]
    if not jobs:
        raise UserError(f"{wanted}: no job that runs there trains it")
    with answering(server):
        for job in jobs:
            server.stop_job(job)
    while not all(server.get_job_status(job).is_terminal() for job in jobs):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return {job: str(server.get_job_status(job)) for job in jobs}


def runtime_env(recipe: Recipe, folder: Path, *, with_packages: bool) -> dict[str, Any]:
    """The runtime environment of a job that trains.

    Args:
        recipe: what it trains.
        folder: has the recipe's file, and becomes the job's working directory.
        with_packages: whether to ship Elastrata, too.
    """
    seconds = math.ceil(recipe.checkpoint.grace_seconds) + _STOP_SECONDS
    return {
        "working_dir": str(folder),
        # Between the SIGTERM of `ray job stop` and its SIGKILL; Ray's own default is 3.
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(seconds)},
        **({"py_modules": list(packages()), "excludes": ["__pycache__"]} if with_packages else {}),
    }


def packages() -> Iterator[str]:
    """The folders of Elastrata's packages, and of what says that they are installed: without it
    nobody would find the workloads."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            yield str(Path(spec.origin).parent)
    try:
        metadata = distribution("elastrata").locate_file("")
    except PackageNotFoundError:
        return
    yield from (str(path) for path in Path(str(metadata)).glob("elastrata-*.dist-info"))


def local_paths(recipe: Recipe) -> Iterator[str]:
    """A line for each folder that would be sought in the job's own, which is gone with it."""
    named = {
        "storage": recipe.storage,
        "evaluation.path": recipe.evaluation.path,
        **{f"evaluation.sets.{n}.path": one.path for n, one in enumerate(recipe.evaluation.sets)},
        **{
            f"phases.{number}.data.{key}" if recipe.phases else f"data.{key}": place
            for number, part in enumerate(recipe.parts)
            for key, place in part.data.places.items()
        },
    }
    for key, path in named.items():
        if path is not None and not Path(path).is_absolute() and Storage(path).is_local:
            yield (
                f"{key}: {path}: expected a URL, or the absolute path of a folder that all nodes "
                "share: a job's own folder is gone with it"
            )


@contextmanager
def job_server(cluster: str) -> Iterator[JobSubmissionClient]:
    """A client of a cluster's job server, for the time of its block.

    Args:
        cluster: the address of its dashboard (`http://HOST:8265`, `HOST:8265`), `auto` for the
            cluster that runs here, or the file or name of a cluster that `ray up` has started,
            which is reached through SSH.

    Raises:
        UserError: there is none, or it does not let us in.
    """
    if (hidden := without_secrets(cluster)) != cluster:
        raise UserError(f"--cluster: {hidden}: {NO_SECRET}")
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    if cluster == "auto" or ":" in cluster:
        yield _connected(cluster, cluster)
        return
    path = find_cluster_file(cluster)
    if not is_launched(path, cluster):
        raise UserError(
            f"--cluster: {cluster}: Kubernetes leads to it: kubectl port-forward "
            f"service/NAME-head-svc {_PORT}, then --cluster http://127.0.0.1:{_PORT}"
        )
    with _tunnel(path, cluster) as address:
        yield _connected(address, cluster)


@contextmanager
def answering(server: JobSubmissionClient) -> Iterator[None]:
    """Runs its block, which asks a job server for something.

    Raises:
        UserError: the server cannot do it, or is gone.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # OSError: that of `requests`, too
        lines = [line for text in str(error).splitlines() if (line := text.strip(" ."))]
        hint = ""
        if _NO_AGENT in str(error):
            hint = (
                ": jobs need ray[default] on the head node; its log dashboard_agent.log says more"
            )
        raise UserError(
            f"--cluster: {server.get_address()}: the job server cannot do it "
            f"({lines[-1] if lines else type(error).__name__}){hint}"
        ) from error


def _connected(address: str, shown: str) -> JobSubmissionClient:
    hidden = {name: os.environ.pop(name) for name in _OVERRIDES if name in os.environ}
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"--cluster: {shown}: it wants its token ({reason}): set RAY_AUTH_MODE=token, and give "
            "the token in RAY_AUTH_TOKEN, in the file RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # OSError: that of `requests`, too
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--cluster: {shown}: no job server answers there ({reason})") from error
    finally:
        os.environ.update(hidden)


@contextmanager
def _tunnel(file: Path, shown: str) -> Iterator[str]:
    """The address on this machine from which SSH leads to the dashboard of a launched cluster."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = str(Path(sys.executable).with_name("ray"))
    tunnel = subprocess.Popen(
        [ray, "dashboard", str(file), "--port", str(port), "--remote-port", str(_PORT)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",  # SSH and the shell there speak the machine's encoding
    )
    try:
        deadline = time.monotonic() + _SECONDS_FOR_A_TUNNEL
        while not _answers(port):
            if tunnel.poll() is not None or time.monotonic() > deadline:
                tunnel.terminate()
                said = [line.strip() for line in tunnel.communicate()[0].splitlines()]
                reason = next((line for line in reversed(said) if line), "no answer in time")
                raise UserError(f"--cluster: {shown}: `ray dashboard` leads nowhere ({reason})")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        tunnel.terminate()
        tunnel.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
