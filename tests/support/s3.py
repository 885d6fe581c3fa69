"""An S3 server of a test's own on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from s3fs import S3FileSystem


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The URL of an empty bucket; the environment leads S3 clients to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "no_proxy": "127.0.0.1",
    }
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        next(line for line in server.stderr if "Running on" in line)
        request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
        with urllib.request.urlopen(request), pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            yield "s3://bucket"
    finally:
        # A file system that is kept for the next test would go on asking this server.
        S3FileSystem.clear_instance_cache()
        os.kill(server.pid, signal.SIGTERM)
        server.communicate()
