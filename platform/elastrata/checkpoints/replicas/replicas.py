"""In-memory checkpoints: a run's newest state, in the memory of processes other than its workers.

`Replicas` has the methods of `elastrata_pipelines.storage.Storage`, so the same code saves and
loads durable and in-memory checkpoints. See `docs/explanation/checkpoints.md` for the guarantees.
This module does not import torch, because drivers and controllers search for commits.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

import numpy as np
import ray
from typing_extensions import override

from elastrata.checkpoints.commit import Commit, CommitStorage, list_commits, size_problems
from elastrata.checkpoints.replicas.registry import (
    ANSWER_SECONDS,
    START_SECONDS,
    Listing,
    group_of,
    start_registry,
)
from elastrata.checkpoints.replicas.store import CHUNK_BYTES, get_answer

_ANSWER_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 5.0
"""Time for the stores to start, after which the registry is asked for a sign of life."""
# Two, so that one is copied into the stores while the next one is filled.
_CHUNKS_IN_FLIGHT = 2
_CHUNK_SECONDS = 20.0
"""Timeout of a chunk to all its stores: 16 MiB in 20 s allow for about 1 MB/s."""


class Replicas:
    """Files in the memory of the stores. Can be pickled and sent to any process of the cluster.

    As in `Storage`, `names` and `exists` make a fresh listing, and `size` uses the last one. A file
    exists if a store that answers has a copy.

    Every method raises an OSError if the registry is gone.
    """

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        self._seen: Listing | None = None

    def __reduce__(self) -> tuple[type[Replicas], tuple[Any]]:
        # Without the listing, which would be stale in another process.
        return Replicas, (self.registry,)

    @property
    def url(self) -> str:
        """Name of the root in messages."""
        return "hot:"

    @property
    def node(self) -> str:
        """Ray's id of the node of this process."""
        return str(ray.get_runtime_context().get_node_id())

    def uri(self, *parts: str) -> str:
        """Return the name of a path in messages."""
        return self.url + "/".join(parts)

    def names(self, *parts: str) -> list[str]:
        """Return the names directly below a folder, sorted; empty if the folder does not exist."""
        above = "".join(f"{part}/" for part in parts)
        below = (path.removeprefix(above) for path in self._look().sizes if path.startswith(above))
        return sorted({path.partition("/")[0] for path in below})

    def exists(self, *parts: str) -> bool:
        """Return whether a file or folder exists."""
        path = "/".join(parts)
        return any(held == path or held.startswith(f"{path}/") for held in self._look().sizes)

    def size(self, *parts: str) -> int:
        """Return the bytes of a file."""
        return self._listing_with("/".join(parts)).sizes["/".join(parts)]

    def read(self, *parts: str) -> bytes:
        """Return all bytes of a file."""
        return self.open(*parts).getvalue()

    def sha256(self, *parts: str) -> str:
        """Return the SHA-256 of a file, as `sha256sum` prints it."""
        return hashlib.sha256(self.open(*parts).getbuffer()).hexdigest()

    def open(self, *parts: str) -> io.BytesIO:
        """Return a file, copied into the memory of this process, preferably from its own node.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: no store with a copy answers.
        """
        path = "/".join(parts)
        try:
            return self._copy_to_this_process(path)
        # A subclass of OSError, but a second look would not help.
        except FileNotFoundError:
            raise
        except OSError:  # a store may have died since the last listing
            self._seen = None
            return self._copy_to_this_process(path)

    def write(self, data: bytes, *parts: str) -> None:
        """Write a file atomically."""
        with self.create(*parts) as stream:
            stream.write(data)

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing that appears, complete, when the block ends without error.

        Raises:
            OSError: a store has died or is full.
        """
        path = "/".join(parts)
        group = group_of(path.partition("/")[0])
        upload = _Upload(self._assigned_stores(group), path)
        try:
            yield cast("IO[bytes]", upload)
            upload.finish()
        except BaseException:
            # All requests first, then the answers, so that dead stores are waited for in parallel.
            for answer in [store.delete.remote(path) for store in upload.stores]:
                with suppress(OSError):
                    get_answer(answer, _ANSWER_SECONDS)
            raise

    def delete(self, *parts: str) -> None:
        """Delete a file, or a folder with its contents; do nothing if it does not exist."""
        self._ask(_ANSWER_SECONDS, "delete", "/".join(parts))
        self._seen = None

    def usage(self) -> dict[str, int]:
        """Return the bytes held on every node that has a store, by the node's id."""
        return cast("dict[str, int]", self._ask(_ANSWER_SECONDS, "usage"))

    def _copy_to_this_process(self, path: str) -> io.BytesIO:
        listing = self._listing_with(path)
        problem = OSError()
        # The copy on this node first: it does not use the network.
        for node in sorted(listing.holders[path], key=lambda node: node != self.node):
            try:
                return _fetch(listing.stores[node], path, listing.sizes[path])
            except OSError as error:
                problem = error
        raise problem

    def _assigned_stores(self, group: str) -> list[Any]:
        """Return the stores for this node's files.

        They may take a minute to start. A registry that does not answer for seconds is given up.
        """
        answer = self.registry.assign.remote(self.node, group)
        deadline = time.monotonic() + START_SECONDS + _ANSWER_SECONDS
        while not ray.wait([answer], timeout=_FIRST_LOOK_SECONDS)[0]:
            if time.monotonic() > deadline:
                break
            self._ask(_ANSWER_SECONDS, "ping")
        return cast("list[Any]", get_answer(answer, 0.0))

    def _listing_with(self, path: str) -> Listing:
        """Return a listing that has the file, a fresh one if necessary."""
        listing = self._seen
        if listing is None or path not in listing.sizes:
            listing = self._look()
        if path not in listing.sizes:
            raise FileNotFoundError(self.uri(path))
        return listing

    def _look(self) -> Listing:
        self._seen = cast(Listing, self._ask(_ANSWER_SECONDS, "listing"))
        return self._seen

    def _ask(self, seconds: float, question: str, *args: Any) -> Any:
        return get_answer(getattr(self.registry, question).remote(*args), seconds)


def open_replicas(limit_bytes: int, answer_seconds: float = ANSWER_SECONDS) -> Replicas:
    """Return new, empty replicas, which last as long as the calling process.

    Args:
        limit_bytes: limit of the bytes on any node. Two states of the run, the newest and the one
            being saved, each twice if there are several nodes, divided by the number of nodes.
        answer_seconds: a store that takes longer to answer is skipped.
    """
    return Replicas(start_registry(limit_bytes, answer_seconds))


def close_replicas(storage: Replicas) -> None:
    """End the registry and all its stores; do nothing if they have ended."""
    ray.kill(storage.registry)


def find_newest_replica(
    storage: CommitStorage, counts: Callable[[int, int], bool] = lambda attempt, step: True
) -> Commit | None:
    """Return the newest commit whose files all exist; None without one, or if no store answers.

    Returns within seconds and never raises.
    """
    # A durable checkpoint takes the place of an in-memory one that cannot be read.
    with suppress(Exception):
        for commit in list_commits(storage):
            if counts(*commit.place) and not size_problems(storage, commit):
                return commit
    return None


def _fetch(store: Any, path: str, size: int) -> io.BytesIO:
    stream = io.BytesIO()
    for index in range(-(-size // CHUNK_BYTES)):
        stream.write(get_answer(store.chunk.remote(path, index), _ANSWER_SECONDS))
    stream.seek(0)
    return stream


class _Upload(io.RawIOBase):
    """Stream for writing, whose contents are a file once `finish` returns."""

    def __init__(self, stores: list[Any], path: str) -> None:
        self.stores = stores
        self._path = path
        self._chunk = np.empty(CHUNK_BYTES, np.uint8)
        self._filled = 0
        self._sent = 0
        self._in_flight: deque[list[Any]] = deque()

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        """Take all of `data`, an object with the buffer protocol; return its number of bytes.

        Raises:
            OSError: a store did not take an earlier chunk.
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
        """Send the rest and wait until every store has the complete file.

        Raises:
            OSError: a store did not take it.
        """
        if self._filled:
            self._send()
        while self._in_flight:
            self._wait()
        answers = [store.finish.remote(self._path, self._sent) for store in self.stores]
        for answer in answers:
            get_answer(answer, _CHUNK_SECONDS)

    def _send(self) -> None:
        if len(self._in_flight) >= _CHUNKS_IN_FLIGHT:
            self._wait()
        # ray.put() copies, so the buffer can be reused, and both stores read the same object.
        chunk = ray.put(self._chunk[: self._filled])
        answers = [store.append.remote(self._path, self._sent, chunk) for store in self.stores]
        self._in_flight.append(answers)
        self._sent += 1
        self._filled = 0

    def _wait(self) -> None:
        for answer in self._in_flight.popleft():
            get_answer(answer, _CHUNK_SECONDS)
