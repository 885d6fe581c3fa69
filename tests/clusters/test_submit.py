"""`elastrata submit`: runs as jobs of a real cluster, with a dashboard and a token."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import ray

from elastrata.cli.main import run
from elastrata.deploy import jobs


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients reach servers of this machine where the user's go through a proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_where_no_job_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:  # it holds its port, and does not listen
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run(["submit", "bert/tiny", "--cluster", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--cluster: {address}: no job server answers there (")


def test_rays_own_search_for_a_server_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JobSubmissionClient", lambda address: address)
    with jobs.connect_to_job_server("auto") as client:
        assert client == "auto"


class WithoutAgent(BaseHTTPRequestHandler):
    """Answers as Ray's dashboard does where no agent runs that could start a job."""

    def do_GET(self) -> None:
        version = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session": ""}
        self._answer(200, "[]" if self.path == "/api/jobs/" else json.dumps(version))

    def do_POST(self) -> None:
        reason = "Failed to get head node agent within 30 seconds. The last exception is None"
        self._answer(500, f"Traceback (most recent call last):\n  File ...\nException: {reason}\n")

    def _answer(self, status: int, text: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def without_agent() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), WithoutAgent)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_job_server_that_cannot_start_jobs_takes_one_line(
    without_agent: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = ["bert/tiny", "storage=s3://bucket/runs", "data.path=s3://bucket/data"]
    recipe += ["tracking.uri=http://mlflow:5000"]
    options = ["--cluster", without_agent, "--installed"]
    assert run(["submit", *recipe, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--cluster: {without_agent}: the job server cannot do it (Exception: ")
    assert "jobs need ray[default] on the head node" in line


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ("kuberay-cluster", "kuberay-cluster: Kubernetes leads to it: kubectl port-forward "),
        ("kuberay", "kuberay: no such cluster (did you mean 'kuberay-"),
        ("one-machine", "one-machine: `ray dashboard` leads nowhere ("),
    ],
)
def test_names_that_lead_nowhere(
    cluster: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray notes what it has looked for
    assert run(["submit", "bert/tiny", "--cluster", cluster]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
