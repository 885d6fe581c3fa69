"""An S3 server of a test's own on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from s3fs import S3FileSystem


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The URL of an empty bucket; the environment leads S3 clients to it."""
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert server.stderr is not None
    endpoint = _find_address(server.stderr)
    # The server writes a line for each request: a full pipe would stop it.
    reader = Thread(target=deque, args=(server.stderr, 0))
    reader.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            _lead_clients(patch, endpoint)
            S3FileSystem.clear_instance_cache()
            request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
            urllib.request.urlopen(request).close()
            yield "s3://bucket"
    finally:
        # A file system that is kept for the next test would go on asking this server.
        S3FileSystem.clear_instance_cache()
        server.terminate()
        server.wait()
        reader.join()
        server.stderr.close()


def _find_address(log: Iterable[str]) -> str:
    """Return the URL that a server which has chosen its port names in its log."""
    lines = []
    for line in log:
        lines.append(line)
        if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError("the S3 server does not start:\n" + "".join(lines))


def _lead_clients(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let S3 clients find the server, whatever the user has configured for AWS."""
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "no_proxy": "127.0.0.1",
    }
    for name, value in settings.items():
        patch.setenv(name, value)
