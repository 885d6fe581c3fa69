"""The jobs that train a run: submitting one, with what it takes along to the cluster; finding it,
following it, stopping it."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import shlex
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import aiohttp
from ray.job_submission import JobDetails, JobSubmissionClient

from elastrata.deploy.job_server import answering
from elastrata.recipe.file import to_yaml
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

RUN = "elastrata_run"
"""The key of a job's metadata that holds its run's URL."""
_SECONDS_BETWEEN_LOOKS = 0.5
_TRIES_TO_FOLLOW = 60
RECIPE = "recipe.yaml"
"""The recipe in the job's working directory, whole: with all that it extends."""
_PACKAGES = ("elastrata", "elastrata_pipelines", "elastrata_workloads")
_STOP_SECONDS = 60
"""After the checkpoint of a stopped run, for its record and its workers' end."""


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
