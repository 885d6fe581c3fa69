"""`elastrata submit`: runs as jobs of a real cluster, with a dashboard and a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import ray

from elastrata.cli.main import run
from elastrata.deploy import jobs
from elastrata_pipelines import waits
from support.deaf_servers import deaf_server, refused_port, say_nothing


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients reach servers of this machine where the user's go through a proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.mark.parametrize("command", [["submit", "bert/tiny"], ["stop", "a-run"]])
def test_where_no_job_server_answers(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "junk")  # not the address of this command
    with refused_port() as port:
        assert run([*command, "--cluster", f"127.0.0.1:{port}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    expected = f"--cluster: 127.0.0.1:{port}: no job server answers there (Connection refused)"
    assert line == expected


@pytest.mark.parametrize("command", [["submit", "bert/tiny"], ["stop", "a-run"]])
def test_where_a_server_does_not_answer(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "READ_SECONDS", 0.5)
    monkeypatch.setattr(waits, "REPORT_SECONDS", 0.0)
    with deaf_server(say_nothing) as port:
        address = f"http://127.0.0.1:{port}"
        assert run([*command, "--cluster", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"--cluster: {address}: no job server answers there (no answer in time)"
    assert caplog.messages == [f"waiting for {address}"]


@pytest.mark.parametrize("address", ["somewhere:99999", "http://somewhere:99999"])
def test_an_impossible_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stop", "a-run", "--cluster", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--cluster: {address}: Port ")
    assert line.endswith(": expected an address such as http://10.0.0.1:8265")


def test_an_address_without_a_scheme_is_that_of_the_dashboard(
    without_agent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["stop", "a-run", "--cluster", without_agent.removeprefix("http://")]) == 2
    assert capsys.readouterr().err == "a-run: no running job on that cluster trains it\n"


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
    assert line.startswith(f"--cluster: {without_agent}: the job server failed (Exception: ")
    assert "jobs need ray[default] on the head node" in line


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ("kuberay-cluster", "kuberay-cluster: on Kubernetes, run kubectl port-forward "),
        ("kuberay", "kuberay: no such cluster (did you mean 'kuberay-"),
        ("one-machine", "one-machine: `ray dashboard` failed ("),
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
