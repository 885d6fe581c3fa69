"""Servers that do not answer: every wait is limited, and reported while it lasts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import fsspec
import pytest
from s3fs import S3FileSystem

from elastrata_pipelines import waits
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation.tokenizer import load_tokenizer
from support.deaf_servers import (
    Serve,
    black_hole,
    deaf_server,
    drip,
    drip_content,
    fail,
    refused_port,
    say_nothing,
)

CHILD = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from elastrata_pipelines import waits

waits.CONNECT_SECONDS, waits.READ_SECONDS, waits.GIVE_UP_SECONDS = 4.0, 5.0, 3.0
waits.REPORT_SECONDS = 0.25

from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.pieces import open_stored
from elastrata_pipelines.preparation.sources import find_files
from elastrata_pipelines.storage import Storage

def read_text(port):
    found = find_files(0, SourceConfig(paths=[f"http://127.0.0.1:{port}/a.txt"]))
    return found.problems or open_stored(found.files[0]).read(100)

def read_object(port):
    fs = Storage("s3://bucket").fs  # sets the limits of every S3 client
    return type(fs)(endpoint_url=f"http://127.0.0.1:{port}").cat_file("bucket/run.json")

def outcome(kind, port):
    try:
        found = {"http": read_text, "s3": read_object}[kind](port)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__module__}: {error}"
    assert isinstance(found, list), found
    return " ".join(found)

cases = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(cases)) as pool:
    print(json.dumps(list(pool.map(lambda case: outcome(*case), cases))))
"""
SERVERS: dict[str, Callable[[], AbstractContextManager[int]]] = {
    "silent": lambda: deaf_server(say_nothing),
    "dripping": lambda: deaf_server(drip),
    "dripping content": lambda: deaf_server(drip_content),
    "failing": lambda: deaf_server(fail),
    "black hole": black_hole,
    "refusing": refused_port,
}
S3_SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
EXPECTED = {
    ("http", "silent"): r"cannot be read \(no answer in time\)",
    ("http", "dripping"): r"cannot be read \(no answer in time\)",
    ("http", "dripping content"): "no answer in time",
    ("http", "failing"): r"cannot be read \(the server answers 503 Slow Down\)",
    ("http", "black hole"): r"cannot be read \(no answer in time\)",
    ("http", "refusing"): r"cannot be read \(Connection refused\)",
    ("s3", "silent"): "no answer in time",
    ("s3", "dripping"): "no answer in time",
    ("s3", "dripping content"): "no answer in time",
    ("s3", "failing"): "the server answers 503|Service Unavailable",
    ("s3", "black hole"): "no answer in time",
    ("s3", "refusing"): "Could not connect to the endpoint URL",
}


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[tuple[str, str], tuple[str, bool]]]:
    """For each client and server, the error, and whether the wait was reported."""
    with ExitStack() as servers:
        # One for each client, as a report is not repeated for the same server.
        ports = {(kind, name): servers.enter_context(SERVERS[name]()) for kind, name in EXPECTED}
        cases = [(kind, port) for (kind, _), port in ports.items()]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(cases)],
            capture_output=True,
            encoding="utf-8",
            timeout=100,
            env=os.environ | S3_SETTINGS,
        )
        assert done.returncode == 0, done.stderr
        reports = done.stderr.splitlines()
        yield {
            case: (error, f"waiting for http://127.0.0.1:{port}" in reports)
            for (case, port), error in zip(ports.items(), json.loads(done.stdout), strict=True)
        }


@pytest.mark.matrix  # a minute beside other work
@pytest.mark.parametrize(("kind", "server"), EXPECTED)
def test_every_wait_ends_and_is_reported(
    ended: dict[tuple[str, str], tuple[str, bool]], kind: str, server: str
) -> None:
    error, is_reported = ended[kind, server]
    assert re.search(EXPECTED[kind, server], error)
    # A text's server that refuses is an error at once.
    assert is_reported == ((kind, server) != ("http", "refusing"))


@pytest.mark.parametrize("serve", [say_nothing, drip])
def test_an_http_server_that_does_not_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "READ_SECONDS", 0.5)
    monkeypatch.setattr(waits, "REPORT_SECONDS", 0.0)
    with deaf_server(serve) as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionError, match="no answer in time"):
            waits.check_answers(f"{url}/file.txt")
        assert caplog.messages == [f"waiting for {url}"]


def test_a_server_that_failed_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused_port() as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):
            waits.open_file_system(f"{url}/file")
        listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
        with listener, pytest.raises(ConnectionRefusedError):
            waits.open_file_system(f"{url}/another")


def test_settings_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = {"s3": {"anon": True, "config_kwargs": {"read_timeout": 99}}}
    monkeypatch.setattr(fsspec.config, "conf", conf)
    waits._configure(("s3", "s3a"), "config_kwargs", {"read_timeout": 1, "connect_timeout": 2})
    found = fsspec.config.apply_config(S3FileSystem, {}, conf)
    assert found == {"anon": True, "config_kwargs": {"read_timeout": 99, "connect_timeout": 2}}


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with refused_port() as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(UserError) as error:
            load_tokenizer("nobody/has-this")
    (line,) = error.value.problems
    reason = "[Errno 111] Connection refused"
    assert line == f"tokenizer.load: nobody/has-this: cannot be loaded ({reason})"
