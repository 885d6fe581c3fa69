"""HTTP clients of fsspec's file systems whose waits are limited and reported.

fsspec sends the options of a file system to other processes, so their classes and functions are
importable by name.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiobotocore.httpsession import AIOHTTPSession
from aiohttp import ClientTimeout
from typing_extensions import override

from elastrata_pipelines.waits import (
    CONNECT_SECONDS,
    GIVE_UP_SECONDS,
    NO_ANSWER,
    READ_SECONDS,
    REPORT_SECONDS,
    SERVER_ERROR,
    SLOWEST_BYTES_PER_SECOND,
    no_answer,
    report,
)

_SECONDS_TO_ANSWER = CONNECT_SECONDS + READ_SECONDS
_SETTINGS_OF_RETRIES = ("AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE")
Result = TypeVar("Result")


async def limit_request(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
    """Limit a request of aiohttp, as its middleware."""
    place = f"{request.url.scheme}://{request.url.authority}"
    answer = await _within(_SECONDS_TO_ANSWER, place, handler(request))
    answer.content = _LimitedStream(answer.content, place)
    return answer


class LimitedSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore is not typed
    """HTTP session of an S3 client that limits requests and the time for their retries."""

    @override
    async def send(self, request: Any) -> Any:
        parts = urlsplit(request.url)
        place = f"{parts.scheme}://{parts.netloc}"
        since, reason = _current_outage(place)
        # botocore counts attempts, and s3fs repeats them: with pauses and limits for each, that
        # takes from seconds to many minutes.
        is_default = not any(name in os.environ for name in _SETTINGS_OF_RETRIES)
        if is_default and time.monotonic() - since > GIVE_UP_SECONDS:
            _outages.pop(place, None)
            raise no_answer(reason)
        is_upload = request.method not in ("GET", "HEAD")
        size = _size(request.body) if is_upload else 0
        report_in = max(0.0, since + REPORT_SECONDS - time.monotonic())
        seconds = _SECONDS_TO_ANSWER + size / SLOWEST_BYTES_PER_SECOND
        reason = NO_ANSWER
        try:
            answer = await _within(seconds, place, super().send(request), report_in=report_in)
            is_failure = answer.status_code >= SERVER_ERROR
            reason = f"the server answers {answer.status_code}" if is_failure else ""
        finally:
            _outages[place] = since, time.monotonic(), reason
        answer.raw.content = _LimitedStream(answer.raw.content, place)
        return answer


# Without `total`, as the default of five minutes would be too short for a large file.
HTTP_OPTIONS = {
    "timeout": ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
    "middlewares": (limit_request,),
}
"""Options of `aiohttp.ClientSession`."""
S3_OPTIONS = {
    "connect_timeout": CONNECT_SECONDS,
    "read_timeout": READ_SECONDS,
    "http_session_cls": LimitedSession,
}
"""Options of `aiobotocore.config.AioConfig`."""


_outages: dict[str, tuple[float, float, str]] = {}
"""Times of each server's first and last failure since its last proper answer, and the reason."""


def _current_outage(place: str) -> tuple[float, str]:
    """Return since when a server has given no proper answer, and why: now, if it has given one."""
    now = time.monotonic()
    since, last, reason = _outages.get(place, (now, now, ""))
    return (since, reason) if reason and now - last <= GIVE_UP_SECONDS else (now, "")


def _size(body: Any) -> int:
    """Return the bytes of a request's body; of a stream, the most that S3 takes at once."""
    if isinstance(body, BytesIO):
        return body.getbuffer().nbytes
    return len(body or b"") if isinstance(body, bytes | bytearray | None) else 5 * 2**30


class _LimitedStream:
    """Body of an answer whose reading ends with an error if hardly anything arrives."""

    def __init__(self, stream: Any, place: str) -> None:
        self._stream, self._place = stream, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, n: int = -1) -> Any:
        """Read at most `n` bytes."""
        return await self._wait(self._stream.read(n))

    async def readany(self) -> Any:
        """Read what has arrived."""
        return await self._wait(self._stream.readany())

    async def _wait(self, reading: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.ensure_future(reading)
        seconds, before = 0.0, self._stream.total_bytes
        try:
            while not (await asyncio.wait({task}, timeout=REPORT_SECONDS))[0]:
                received, before = self._stream.total_bytes - before, self._stream.total_bytes
                if received >= REPORT_SECONDS * SLOWEST_BYTES_PER_SECOND:
                    seconds = 0.0
                    continue
                seconds += REPORT_SECONDS
                report(self._place)
                if seconds >= READ_SECONDS:
                    raise no_answer()
            return task.result()
        finally:
            task.cancel()


async def _within(
    seconds: float, place: str, call: Awaitable[Result], *, report_in: float = REPORT_SECONDS
) -> Result:
    """Wait for an answer, and report and limit the wait."""
    timer = asyncio.get_running_loop().call_later(report_in, report, place)
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError as error:
        if str(error):
            raise
        raise no_answer() from None
    finally:
        timer.cancel()
