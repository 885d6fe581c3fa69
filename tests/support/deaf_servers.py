"""Servers on this machine that do not answer as a client expects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event

Serve = Callable[[socket.socket, Event], None]


def say_nothing(client: socket.socket, is_over: Event) -> None:
    """Accepts, and never answers."""
    is_over.wait()


def drip(client: socket.socket, is_over: Event) -> None:
    """Sends five bytes a second, from the first byte of the answer on."""
    client.recv(2**16)
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000:
        client.sendall(bytes([byte]))
        if is_over.wait(0.2):
            return


def drip_content(client: socket.socket, is_over: Event) -> None:
    """Answers HEAD and short requests at once, and sends the content byte by byte."""
    stream = client.makefile("rb")
    while line := stream.readline():
        while stream.readline().strip():
            pass
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n")
        if line.startswith(b"GET / "):
            client.sendall(b"Content-Length: 0\r\n\r\n")
            continue
        client.sendall(b"Content-Length: 100000\r\n\r\n")
        if line.startswith(b"HEAD"):
            continue
        while not is_over.wait(0.2):
            client.sendall(b"x")
        return


def fail(client: socket.socket, is_over: Event) -> None:
    """Answers every request with 503, as a server that is asked too often."""
    body = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>slower</Message></Error>"
    stream = client.makefile("rb")
    while line := stream.readline():
        length = 0
        while header := stream.readline().strip().lower():
            if header.startswith(b"content-length:"):
                length = int(header.partition(b":")[2])
        stream.read(length)
        head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        client.sendall(head + (b"" if line.startswith(b"HEAD") else body))


@contextmanager
def deaf_server(serve: Serve, host: str = "127.0.0.1") -> Iterator[int]:
    """The port of a server that treats every connection so, each in a thread."""
    is_over, clients = Event(), []

    def treat(client: socket.socket) -> None:
        with suppress(OSError), client:
            serve(client, is_over)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                clients.append(client)
                threading.Thread(target=treat, args=(client,), daemon=True).start()

    with socket.create_server((host, 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            is_over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in clients:
                client.close()


@contextmanager
def black_hole() -> Iterator[int]:
    """The port of a server that drops what is sent to it, as a firewall does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # Linux drops the first packet of further connections when the queue is full.
        waiting = []
        try:
            for _ in range(3):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(listener.getsockname())
                waiting.append(client)
            yield int(listener.getsockname()[1])
        finally:
            for client in waiting:
                client.close()


@contextmanager
def refused_port() -> Iterator[int]:
    """A port at which no process listens, and which only a socket with SO_REUSEPORT gets."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
