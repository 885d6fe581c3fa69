"""The upload of one file to the keepers of the hot tier, while it is being written."""

from __future__ import annotations

import io
from collections import deque
from typing import Any

import numpy as np
import ray
from typing_extensions import override

from elastrata.replicas.call import answered
from elastrata.replicas.store import CHUNK_BYTES

_CHUNKS_UNDER_WAY = 2
_CHUNK_SECONDS = 20.0
"""How long a chunk may take to all its keepers: some 1 MB/s at worst."""


class HotUpload(io.RawIOBase):
    """A stream for writing; what goes into it is a file when `finish` returns.

    Args:
        keepers: all get the file.
        path: of the file.
    """

    def __init__(self, keepers: list[Any], path: str) -> None:
        self._keepers = keepers
        self._path = path
        self._chunk = np.empty(CHUNK_BYTES, np.uint8)
        self._filled = 0
        self._sent = 0
        self._under_way: deque[list[Any]] = deque()

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        """Takes all of `data`, an object with the buffer protocol; returns its bytes.

        Raises:
            OSError: a keeper did not take what was written before.
        """
        source = np.frombuffer(data, np.uint8)
        taken = 0
        while taken < source.nbytes:
            part = source[taken : taken + CHUNK_BYTES - self._filled]
            self._chunk[self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            taken += part.nbytes
            if self._filled == CHUNK_BYTES:
                self._send()
        return source.nbytes

    def finish(self) -> None:
        """Sends the rest and waits until every keeper has the file.

        Raises:
            OSError: one did not take it.
        """
        if self._filled:
            self._send()
        while self._under_way:
            self._wait()
        for answer in [keeper.finish.remote(self._path, self._sent) for keeper in self._keepers]:
            answered(answer, _CHUNK_SECONDS)

    def _send(self) -> None:
        if len(self._under_way) >= _CHUNKS_UNDER_WAY:
            self._wait()
        # put() copies, so the buffer is free again, and both keepers read one object.
        chunk = ray.put(self._chunk[: self._filled])
        self._under_way.append(
            [keeper.append.remote(self._path, self._sent, chunk) for keeper in self._keepers]
        )
        self._sent += 1
        self._filled = 0

    def _wait(self) -> None:
        for answer in self._under_way.popleft():
            answered(answer, _CHUNK_SECONDS)
