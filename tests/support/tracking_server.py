"""MLflow's tracking server as a team has one: records in PostgreSQL, artifacts on S3."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from support.command import wait_until

_BIN = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
"""Where Debian has PostgreSQL's programs, by version."""
_USER = "postgres"


@contextmanager
def postgresql() -> Iterator[str]:
    """The URL of an empty database on a server of the test's own. Skips where there is none."""
    if not _BIN:
        pytest.skip("PostgreSQL is not installed (Debian's package postgresql)")
    if importlib.util.find_spec("psycopg2") is None:
        pytest.skip("PostgreSQL's client is not installed (psycopg2-binary)")
    folder = Path(tempfile.mkdtemp(prefix="postgresql-", dir="/tmp"))  # sockets need short paths
    port = _free_port()
    # It refuses to run as root: Debian's package brings a user for it.
    prefix = ["runuser", "-u", _USER, "--"] if os.geteuid() == 0 else []
    if prefix:
        shutil.chown(folder, _USER)

    def call(program: str, *arguments: object) -> None:
        command = [*prefix, _BIN[-1] / program, "-D", folder / "data", *arguments]
        done = subprocess.run([*map(str, command)], capture_output=True, encoding="utf-8", cwd="/")
        assert done.returncode == 0, done.stdout + done.stderr

    call("initdb", "--username", _USER, "--auth", "trust")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    call("pg_ctl", "start", "--wait", "-l", folder / "log", "-o", options)
    try:
        yield f"postgresql+psycopg2://{_USER}@127.0.0.1:{port}/{_USER}"
    finally:
        call("pg_ctl", "stop", "--mode", "immediate")
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def tracking_server(database: str, artifacts: str, log: Path) -> Iterator[str]:
    """The address of a tracking server, as `docs/how-to/clusters.md` starts it."""
    port = _free_port()
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("mlflow")), "server", "--workers", "1"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--backend-store-uri", database, "--artifacts-destination", artifacts),
            ],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, log.read_text(encoding="utf-8")
        try:
            with urlopen(f"{address}/health", timeout=5):
                return True
        except (URLError, OSError):
            return False

    try:
        wait_until(answers, 120, "the tracking server")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
