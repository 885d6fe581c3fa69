"""The job server of a cluster: where it is, and that it answers."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from elastrata.deploy.cluster_file import find_cluster_file, is_launched
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.url_secrets import NO_SECRET, without_secrets

_PORT = 8265
_SECONDS_FOR_A_TUNNEL = 60.0
_OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that Ray's client would follow rather than the address it is given."""
_NOISY_LOGGERS = ("ray.dashboard", "ray._private.runtime_env", "ray._common")
"""They tell of every package and connection."""

_NO_AGENT = "Failed to get head node agent"
"""In what a server answers that has nobody to start jobs."""


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
