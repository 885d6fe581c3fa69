"""Waits for servers: the one place that limits them, and reports one that lasts.

Libraries have limits of their own, but few limit everything: fsspec waits five minutes for an HTTP
server, Ray's and the hub's clients for ever, and no client stops reading from a server that sends
a byte every other second. A user's own settings of a library win over those here.
"""

from __future__ import annotations

import errno
import http.client
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import fsspec
from fsspec.core import url_to_fs

CONNECT_SECONDS = 5.0
"""Time to make a connection."""
READ_SECONDS = 15.0
"""Time to answer a small request, and the longest time in which nothing arrives."""
GIVE_UP_SECONDS = 30.0
"""Time in which a server that fails is asked again, and between two reports of a wait."""
REPORT_SECONDS = 3.0
"""Time after which a wait is reported."""
SLOWEST_BYTES_PER_SECOND = 256
"""A slower answer counts as none."""
NO_ANSWER = "no answer in time"
SERVER_ERROR = 500
"""Lowest HTTP status of a server that fails."""
# Only Linux has the first one.
_ERROR_OF_SERVER = getattr(errno, "EREMOTEIO", errno.ECANCELED)

_log = logging.getLogger(__name__)
_reported: dict[str, float] = {}
Result = TypeVar("Result")


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Report on standard error what the block waits for, if it lasts."""
    timer = threading.Timer(REPORT_SECONDS, report, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def report(what: str) -> None:
    """Report a wait on standard error, unless it has just been reported."""
    now = time.monotonic()
    if now - _reported.get(what, -GIVE_UP_SECONDS) >= GIVE_UP_SECONDS:
        _reported[what] = now
        _log.warning("waiting for %s", what)


def call_within(seconds: float, what: str, call: Callable[[], Result]) -> Result:
    """Call a function, and report and limit the time that it takes.

    Args:
        seconds: longest time. The call goes on in its thread, but its result is dropped.
        what: name of what it waits for.
        call: function to call, in another thread.

    Raises:
        ConnectionError: it takes longer.
        Exception: any error of the function.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    # Only another thread limits all that a library does in turn: names, connections, retries. The
    # process does not wait for a daemon when it exits.
    threading.Thread(target=run, daemon=True).start()
    with waiting_for(what):
        try:
            return outcome.result(seconds)
        except TimeoutError:
            raise no_answer() from None


def no_answer(reason: str = NO_ANSWER) -> ConnectionError:
    """Return the error of a wait that was too long."""
    # Not a TimeoutError: s3fs would retry it, and fsspec drop its text.
    return ConnectionError(errno.ETIMEDOUT, reason)


def check_port(host: str, port: int) -> None:
    """Check that a process listens at an address.

    Raises:
        OSError: none does, or the host cannot be found.
    """
    # A host may have many addresses.
    call_within(
        2 * CONNECT_SECONDS,
        f"{host}:{port}",
        lambda: socket.create_connection((host, port), CONNECT_SECONDS).close(),
    )


def uses_proxy(url: str) -> bool:
    """Return whether the environment names a proxy for a URL."""
    parts, proxies = urlsplit(url), getproxies()
    is_set = proxies.get(parts.scheme) or proxies.get("all")
    return bool(is_set) and not proxy_bypass(parts.hostname or "")


def check_answers(url: str, *, any_status: bool = False) -> None:
    """Check that an HTTP server answers a small request, whatever it answers to it.

    Args:
        url: the request.
        any_status: whether an error of the server's own is an answer, too.

    Raises:
        OSError: it does not, or only with errors of its own, for half a minute.
    """
    # The client's proxy may reach what this process cannot.
    if uses_proxy(url):
        return
    place = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    give_up = time.monotonic() + READ_SECONDS
    while True:
        try:
            status, reason = call_within(READ_SECONDS, place, lambda: _ask(url))
            if any_status or status < SERVER_ERROR:
                return
            error: OSError = ConnectionError(
                _ERROR_OF_SERVER, f"the server answers {status} {reason}"
            )
        except OSError as failure:
            error = failure
        except http.client.HTTPException as failure:
            error = ConnectionError(errno.EPROTO, f"no HTTP server answers ({failure})")
        # Only a server that is up, but busy, may be well again in seconds.
        if error.errno != _ERROR_OF_SERVER or time.monotonic() > give_up:
            raise error
        with waiting_for(place):
            time.sleep(1)


def _ask(url: str) -> tuple[int, str]:
    """Return the status and reason with which a server answers."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        # Whether to trust the server is the client's question, which may know other authorities.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, parts.port, timeout=CONNECT_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        connection.sock.settimeout(READ_SECONDS)
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        return answer.status, answer.reason
    finally:
        connection.close()


_answers: dict[str, tuple[float, OSError | None]] = {}
"""When each HTTP server was asked last, and the error if it did not answer."""


def open_file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URL, whose waits are limited and reported, and the path in it.

    Raises:
        OSError: an HTTP server does not answer. Other stores are asked when they are used.
    """
    if "http" in url or "s3" in url:
        _limit_clients()
    if url.startswith(("http:", "https:")):
        parts = urlsplit(url)
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/"
        asked, error = _answers.get(place, (-math.inf, None))
        # Of many files at one server only the first asks, and only it waits for a dead one.
        if time.monotonic() - asked > GIVE_UP_SECONDS:
            # fsspec takes an HTTP server that does not answer for one without the file.
            error = None
            try:
                check_answers(place, any_status=True)
            except OSError as failure:
                error = failure
            _answers[place] = time.monotonic(), error
        if error is not None:
            raise error
    fs, path = url_to_fs(url)
    return fs, str(path)


@cache
def _limit_clients() -> None:
    """Limit the clients of fsspec's file systems."""
    # The import takes long, and local folders do not need it.
    from elastrata_pipelines.limited_clients import HTTP_OPTIONS, S3_OPTIONS

    _configure(("http", "https"), "client_kwargs", HTTP_OPTIONS)
    _configure(("s3", "s3a"), "config_kwargs", S3_OPTIONS)


def _configure(protocols: tuple[str, ...], key: str, values: Mapping[str, Any]) -> None:
    """Add default values to an option of a file system, below those that the user has set."""
    own: dict[str, Any] = {}
    for protocol in protocols:
        own |= fsspec.config.conf.get(protocol, {}).get(key) or {}
    # fsspec merges the sections in this order, so the last one counts.
    fsspec.config.conf.setdefault(protocols[-1], {})[key] = {**values, **own}


def reach_hub(path: str) -> OSError | None:
    """Limit the client of the Hugging Face hub; return why the hub cannot be reached, or None.

    Args:
        path: path of a small answer of the hub.
    """
    from huggingface_hub import constants

    _limit_hub()
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        check_answers(f"{os.environ.get('HF_ENDPOINT') or constants.ENDPOINT}{path}")
    except OSError as error:
        return error
    return None


@cache
def _limit_hub() -> None:
    from huggingface_hub import get_session, set_client_factory

    default: Any = get_session()
    make, hooks, limits = type(default), default.event_hooks, default.timeout
    # A factory that the user has set has limits of its own.
    if limits.read is None:
        limits = type(limits)(READ_SECONDS, connect=CONNECT_SECONDS)
        set_client_factory(lambda: make(event_hooks=hooks, follow_redirects=True, timeout=limits))
