"""A proxy in front of an S3 server that answers for it: with errors, or not at all."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from s3fs import S3FileSystem

_HOP_BY_HOP = ("connection", "transfer-encoding", "date", "server")
_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>a test</Message></Error>'


class FaultyS3:
    """What happens to requests.

    Attributes:
        answer: called with method and path; gives the error to answer with, as status and S3's
            code, or None: the server answers. A status of 0 breaks the connection.
        asked: method and path of every request so far.
        refused: how many of them got an error.
    """

    def __init__(self) -> None:
        self.answer: Callable[[str, str], tuple[int, str] | None] = lambda method, path: None
        self.asked: list[tuple[str, str]] = []
        self.refused = 0

    def fail(self, times: int, status: int, code: str) -> None:
        """The next so many requests get this error."""
        left = [times]

        def answer(method: str, path: str) -> tuple[int, str] | None:
            left[0] -= 1
            return (status, code) if left[0] >= 0 else None

        self.answer = answer


@contextmanager
def faulty_s3(endpoint: str) -> Iterator[FaultyS3]:
    """A proxy to the server at `endpoint`; the environment leads S3 clients to it."""
    faults, behind = FaultyS3(), urlsplit(endpoint).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            faults.asked.append((self.command, self.path))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            error = faults.answer(self.command, self.path)
            if error is None:
                self._pass_on(body)
                return
            faults.refused += 1
            status, code = error
            if not status:
                self.close_connection = True
                self.connection.close()
                return
            self._send(status, {"Content-Type": "application/xml"}, _ERROR.format(code).encode())

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one  # noqa: N815

        def _pass_on(self, body: bytes) -> None:
            server = http.client.HTTPConnection(behind)
            server.request(self.command, self.path, body, dict(self.headers))
            found = server.getresponse()
            headers = {k: v for k, v in found.getheaders() if k.lower() not in _HOP_BY_HOP}
            self._send(found.status, headers, found.read())
            server.close()

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            length = {"Content-Length": str(len(body))} if self.command != "HEAD" else {}
            for name, value in {**headers, **length}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
            S3FileSystem.clear_instance_cache()
            yield faults
    finally:
        S3FileSystem.clear_instance_cache()
        proxy.shutdown()
        thread.join()
        proxy.server_close()
