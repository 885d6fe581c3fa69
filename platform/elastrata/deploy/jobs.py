"""Jobs that train a run on another cluster: submit, follow, stop; and their server."""

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
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from elastrata.deploy.clusters import find_cluster_file, is_launcher_file
from elastrata.driver.ray_session import describe_token
from elastrata.recipe.file import to_yaml
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import with_given
from elastrata_pipelines.errors import UserError, format_command
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import NO_SECRET, hide_unrecorded_parts
from elastrata_pipelines.waits import NO_ANSWER, call_within, check_answers, waiting_for

RUN = "elastrata_run"
"""Key of a job's metadata with its run's URL."""
_SECONDS_BETWEEN_LOOKS = 0.5
_TRIES_TO_FOLLOW = 60
RECIPE = "recipe.yaml"
"""Name of the resolved recipe in the job's working directory, without `extends`."""
_PACKAGES = ("elastrata", "elastrata_pipelines", "elastrata_workloads")
_STOP_SECONDS = 60
"""Time for a stopped run to finish its record and its workers, after the checkpoint."""
_PORT = 8265
_SECONDS_TO_ANSWER = 60.0
_SECONDS_TO_SUBMIT = 300.0
"""Time to send the code, too."""
Answer = TypeVar("Answer")
_SECONDS_FOR_A_TUNNEL = 60.0
_OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that take precedence over the address that Ray's client is given."""
_NOISY_LOGGERS = ("ray.dashboard", "ray._private.runtime_env", "ray._common")
"""Loggers that report every package and connection."""

_NO_AGENT = "Failed to get head node agent"
"""Part of the error of a server that has no agent to start jobs."""


def submit(
    server: JobSubmissionClient, recipe: Recipe, *, name: str, tries: int, installed: bool
) -> str:
    """Submit a job that trains a recipe or continues its run; return the job's id.

    Args:
        server: client of the cluster's job server.
        recipe: recipe to train.
        name: name of the run.
        tries: restarts of a killed driver.
        installed: True to use the Elastrata that is installed on the cluster instead of shipping
            this one.

    Raises:
        UserError: a job already trains that run, the recipe names folders of this machine, or the
            server cannot start jobs.
    """
    if problems := list(find_local_paths(recipe)):
        raise UserError(*problems)
    run = Storage(recipe.storage).uri(name)
    for job in list_running_jobs(server, run):
        raise UserError(
            f"name: {name}: job {job.submission_id} already trains that run; `elastrata stop` "
            "ends it after a checkpoint"
        )
    command = ["python3", "-m", "elastrata.deploy.job_entrypoint", version("elastrata"), str(tries)]
    with tempfile.TemporaryDirectory() as folder, job_server_errors(server):
        text = with_given(recipe.given, to_yaml(recipe))
        (Path(folder) / RECIPE).write_text(text, encoding="utf-8")
        environment = runtime_env(recipe, Path(folder), with_packages=not installed)
        return call_within(
            _SECONDS_TO_SUBMIT,
            f"the job server at {server.get_address()}",
            lambda: server.submit_job(
                entrypoint=shlex.join([*command, RECIPE, "--name", name]),
                # A run may be submitted several times, but the id of a job is unique.
                submission_id=f"{name}-{uuid.uuid4().hex[:8]}",
                runtime_env=environment,
                metadata={RUN: run},
            ),
        )


def list_running_jobs(server: JobSubmissionClient, wanted: str) -> list[JobDetails]:
    """Return the running jobs of a run, by its URL or name, or with this job id."""
    with job_server_errors(server):
        jobs = _ask(server, server.list_jobs)
    return [
        job
        for job in jobs
        if not job.status.is_terminal()
        and wanted in _names(job.submission_id or "", (job.metadata or {}).get(RUN, ""))
    ]


def _names(job: str, run: str) -> Sequence[str]:
    """Return the names by which a user may refer to a job."""
    return [job, run, run.rsplit("/", 1)[-1]] if run else [job]


def follow(server: JobSubmissionClient, job: str, show: Callable[[str], None]) -> str:
    """Show a job's output until the job ends; return its final status.

    A broken connection is made again, and the output continues at the same character.

    Raises:
        ConnectionError: the server cannot be reached any more.
    """
    output = _Output(show)
    failures = 0
    while failures < _TRIES_TO_FOLLOW:
        before = output.shown
        try:
            asyncio.run(output.tail(server, job))
            if (status := _status(server, job)).is_terminal():
                return str(status)
        except (OSError, RuntimeError, aiohttp.ClientError):
            # Only failures without any new output count.
            failures = 0 if output.shown > before else failures + 1
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise ConnectionError(f"lost the job server; the job {job} may continue")


class _Output:
    """Output of a job, with the position up to which it has been shown."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.shown = 0
        """Number of characters shown."""
        self._show = show

    async def tail(self, server: JobSubmissionClient, job: str) -> None:
        """Show new output while the connection lasts."""
        received = 0
        async for text in server.tail_job_logs(job):
            # Every connection sends the output from the start.
            new_text = text[max(0, self.shown - received) :]
            received += len(text)
            self.shown = max(self.shown, received)
            if new_text:
                self._show(new_text)


def stop(server: JobSubmissionClient, wanted: str) -> dict[str, str]:
    """Stop the jobs of a run, which save first, and wait until they have ended.

    Args:
        server: client of the cluster's job server.
        wanted: the run's name or URL, or the id of a job.

    Returns:
        The status of each job.

    Raises:
        UserError: no such job is running.
    """
    jobs = [str(job.submission_id) for job in list_running_jobs(server, wanted)]
    if not jobs:
        raise UserError(f"{wanted}: no running job on that cluster trains it")
    with job_server_errors(server):
        for job in jobs:
            _ask(server, partial(server.stop_job, job))
        while not all(_status(server, job).is_terminal() for job in jobs):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return {job: str(_status(server, job)) for job in jobs}


def _status(server: JobSubmissionClient, job: str) -> JobStatus:
    return _ask(server, partial(server.get_job_status, job))


def _ask(server: JobSubmissionClient, question: Callable[[], Answer]) -> Answer:
    """Return the server's answer to a question, which Ray's client would await for ever.

    Raises:
        Exception: it does not come, or any error of the client.
    """
    return call_within(_SECONDS_TO_ANSWER, f"the job server at {server.get_address()}", question)


def runtime_env(recipe: Recipe, folder: Path, *, with_packages: bool) -> dict[str, Any]:
    """Return the runtime environment of a job that trains.

    Args:
        recipe: recipe to train.
        folder: folder with the recipe's file, which becomes the job's working directory.
        with_packages: True to ship Elastrata with the job.
    """
    seconds = math.ceil(recipe.checkpoint.grace_seconds) + _STOP_SECONDS
    return {
        "working_dir": str(folder),
        # Between the SIGTERM of `ray job stop` and its SIGKILL; Ray's own default is 3.
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(seconds)},
        **(
            {"py_modules": list(package_folders()), "excludes": ["__pycache__"]}
            if with_packages
            else {}
        ),
    }


def package_folders() -> Iterator[str]:
    """Yield the folders of Elastrata's packages and of their metadata."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            yield str(Path(spec.origin).parent)
    try:
        # Without the metadata the workloads' entry points would not be found.
        metadata = distribution("elastrata").locate_file("")
    except PackageNotFoundError:
        return
    yield from (str(path) for path in Path(str(metadata)).glob("elastrata-*.dist-info"))


def find_local_paths(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each path in a recipe that would be relative to the job's own folder."""
    paths = {
        "storage": recipe.storage,
        "evaluation.path": recipe.evaluation.path,
        **{f"evaluation.sets.{n}.path": one.path for n, one in enumerate(recipe.evaluation.sets)},
        **{
            f"phases.{number}.data.{key}" if recipe.phases else f"data.{key}": place
            for number, part in enumerate(recipe.parts)
            for key, place in part.data.places.items()
        },
    }
    for key, path in paths.items():
        if path is not None and not Path(path).is_absolute() and Storage(path).is_local:
            yield (
                f"{key}: {path}: expected a URL, or the absolute path of a folder that all nodes "
                "share: a job's own folder is deleted with the job"
            )


@contextmanager
def connect_to_job_server(cluster: str) -> Iterator[JobSubmissionClient]:
    """Connect to a cluster's job server while the block runs.

    Args:
        cluster: the address of its dashboard (`http://HOST:8265`, `HOST:8265`), `auto` for the
            cluster on this machine, or the file or name of a cluster that `ray up` has started,
            which is reached through SSH.

    Raises:
        UserError: no server answers, or it denies access.
    """
    if (masked := hide_unrecorded_parts(cluster)) != cluster:
        raise UserError(f"--cluster: {masked}: {NO_SECRET}")
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    # Addresses have a colon; names and paths of cluster files have none.
    if cluster == "auto" or ":" in cluster:
        yield _connect(cluster, cluster)
        return
    path = find_cluster_file(cluster)
    if not is_launcher_file(path, cluster):
        raise UserError(
            f"--cluster: {cluster}: on Kubernetes, run kubectl port-forward "
            f"service/NAME-head-svc {_PORT}, then use --cluster http://127.0.0.1:{_PORT}"
        )
    with _tunnel(path, cluster) as address:
        yield _connect(address, cluster)


@contextmanager
def job_server_errors(server: JobSubmissionClient) -> Iterator[None]:
    """Run a block that calls a job server.

    Raises:
        UserError: the call failed, or the server is gone.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # OSError: that of `requests`, too
        lines = [line for text in str(error).splitlines() if (line := text.strip(" ."))]
        hint = ""
        if _NO_AGENT in str(error):
            hint = ": jobs need ray[default] on the head node; see its log dashboard_agent.log"
        raise UserError(
            f"--cluster: {server.get_address()}: the job server failed "
            f"({lines[-1] if lines else type(error).__name__}){hint}"
        ) from error


def _connect(address: str, shown: str) -> JobSubmissionClient:
    what = f"the job server at {address}"
    # Ray's client has no argument that takes precedence over these variables.
    removed = {name: os.environ.pop(name) for name in _OVERRIDES if name in os.environ}
    try:
        if address != "auto":  # Ray finds that one itself
            # It would take an address without a scheme for that of the head process.
            address = address if "://" in address else f"http://{address}"
            _check_port(address, shown)
            # Ray's client retries a refused connection for 40 seconds, logs each attempt, and
            # waits for any other server for ever.
            if address.startswith(("http://", "https://")):
                check_answers(f"{address.rstrip('/')}/api/version")
        return call_within(_SECONDS_TO_ANSWER, what, lambda: JobSubmissionClient(address))
    except AuthenticationError as error:
        raise UserError(f"--cluster: {shown}: {describe_token(error)}") from error
    except (OSError, RuntimeError, ValueError) as error:  # OSError: that of `requests`, too
        named = error.strerror if isinstance(error, OSError) else None
        reason = named or str(error).strip().splitlines()[0]
        raise UserError(f"--cluster: {shown}: no job server answers there ({reason})") from error
    finally:
        os.environ.update(removed)


def _check_port(address: str, shown: str) -> None:
    """Check that an address has a possible port.

    Raises:
        UserError: it has none.
    """
    try:
        _ = urlsplit(address).port
    except ValueError as error:
        raise UserError(
            f"--cluster: {shown}: {error}: expected an address such as http://10.0.0.1:{_PORT}"
        ) from None


@contextmanager
def _tunnel(file: Path, shown: str) -> Iterator[str]:
    """Open an SSH tunnel to the dashboard of a launched cluster; yield its local address."""
    with socket.socket() as free:
        # The system chooses a free port.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `ray dashboard` knows the cluster's SSH user and key.
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
        with waiting_for(f"`{format_command('ray', 'dashboard', shown)}`"):
            while not _accepts_connection(port):
                if tunnel.poll() is not None or time.monotonic() > deadline:
                    tunnel.terminate()
                    output = [line.strip() for line in tunnel.communicate()[0].splitlines()]
                    reason = next((line for line in reversed(output) if line), NO_ANSWER)
                    raise UserError(f"--cluster: {shown}: `ray dashboard` failed ({reason})")
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        tunnel.terminate()
        tunnel.wait()


def _accepts_connection(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
