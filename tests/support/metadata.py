"""Stand-ins for the clouds' metadata servers: real HTTP, answers that a test sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata:
    """What the server says.

    Attributes:
        answers: by path with query what is answered; 404 where there is nothing.
        needs: by path the header, with its value, without which the answer is 401; a value of `*`
            stands for any.
        broken: whether every answer is 503.
        asked: method and path of every request so far.
    """

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.needs: dict[str, tuple[str, str]] = {}
        self.broken = False
        self.asked: list[tuple[str, str]] = []
        self.url = ""

    def reply(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        self.asked.append((method, path))
        name, value = self.needs.get(path, ("", ""))
        if (name and headers.get(name) is None) or value not in ("*", headers.get(name, "")):
            return 401, "the header is missing"
        if self.broken:
            return 503, "try again later"
        return (200, self.answers[path]) if path in self.answers else (404, "")


@contextmanager
def metadata_server() -> Iterator[Metadata]:
    """A server on this machine that answers until the block ends."""
    metadata = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = metadata.reply(self.command, self.path, self.headers)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    metadata.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield metadata
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
