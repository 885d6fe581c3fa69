"""The upload of a file to the stores that are to have it."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from typing_extensions import override

from elastrata.replicas.store import CHUNK_BYTES, answered

_CHUNKS_UNDER_WAY = 2
_CHUNK_SECONDS = 20.0
"""How long a chunk may take to all its stores: some 1 MB/s at worst."""


@dataclass(frozen=True)
class ParityStores:
    """Where the parity of a file goes."""

    name: str
    """Of the parity."""
    stores: Sequence[Any]
    """They take the file's chunks in turns."""


class ReplicaUpload(io.RawIOBase):
    """A stream for writing; what goes into it is a file when `finish` returns.

    Args:
        stores: all get the file.
        path: of the file.
        parity: where its parity goes.
    """

    def __init__(self, stores: list[Any], path: str, parity: ParityStores | None = None) -> None:
        self.stores = [*stores, *(parity.stores if parity else ())]
        """All that have anything of the file."""
        self._copies, self._parity = stores, parity
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
            OSError: a store did not take what was written before.
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
        """Sends the rest and waits until every store has the file.

        Raises:
            OSError: one did not take it.
        """
        size = self._sent * CHUNK_BYTES + self._filled
        if self._filled:
            self._send()
        while self._under_way:
            self._wait()
        answers = [store.finish.remote(self._path, self._sent) for store in self._copies]
        if self._parity:
            number = len(self._parity.stores)
            for place, store in enumerate(self._parity.stores):
                indexes = range(place, self._sent, number)
                answers.append(store.seal.remote(self._parity.name, self._path, size, indexes))
        for answer in answers:
            answered(answer, _CHUNK_SECONDS)

    def _send(self) -> None:
        if len(self._under_way) >= _CHUNKS_UNDER_WAY:
            self._wait()
        # put() copies, so the buffer is free again, and both stores read one object.
        chunk = ray.put(self._chunk[: self._filled])
        answers = [store.append.remote(self._path, self._sent, chunk) for store in self._copies]
        if self._parity:
            host = self._parity.stores[self._sent % len(self._parity.stores)]
            answers.append(host.fold.remote(self._parity.name, self._path, self._sent, chunk))
        self._under_way.append(answers)
        self._sent += 1
        self._filled = 0

    def _wait(self) -> None:
        for answer in self._under_way.popleft():
            answered(answer, _CHUNK_SECONDS)
