"""In-memory replicas: a run's newest state, in the memory of other processes than its workers'.

`Replicas` has the methods of `elastrata_pipelines.storage.Storage`, so what saves and loads
durable checkpoints saves and loads replicas. `docs/checkpoints.md` says what it promises. Free of
torch, as drivers and controllers look for commits.
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

from elastrata.checkpoints.commit import Commit, CommitStorage, commits, size_problems
from elastrata.checkpoints.replicas.registry import (
    ANSWER_SECONDS,
    START_SECONDS,
    Listing,
    group_of,
    start_registry,
)
from elastrata.checkpoints.replicas.store import CHUNK_BYTES, answered

_ANSWER_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 5.0
"""If the stores take longer than this to start, the registry is asked whether it still lives."""
_CHUNKS_UNDER_WAY = 2
_CHUNK_SECONDS = 20.0
"""How long a chunk may take to all its stores: some 1 MB/s at worst."""


class Replicas:
    """Files in the memory of the stores; a value that can be sent to any process of the cluster.

    As with `Storage`, `names` and `exists` look afresh, and `size` answers from the last look.
    A file of which no store that answers has a copy does not exist.

    Every method raises an OSError where the registry is gone.
    """

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        self._seen: Listing | None = None

    def __reduce__(self) -> tuple[type[Replicas], tuple[Any]]:
        return Replicas, (self.registry,)

    @property
    def url(self) -> str:
        """The name of the root in messages."""
        return "hot:"

    @property
    def node(self) -> str:
        """The node of this process."""
        return str(ray.get_runtime_context().get_node_id())

    def uri(self, *parts: str) -> str:
        """The name of a path in messages."""
        return self.url + "/".join(parts)

    def names(self, *parts: str) -> list[str]:
        """The names directly below a folder, sorted; empty where there is no such folder."""
        above = "".join(f"{part}/" for part in parts)
        below = (path.removeprefix(above) for path in self._look().sizes if path.startswith(above))
        return sorted({path.partition("/")[0] for path in below})

    def exists(self, *parts: str) -> bool:
        """Whether there is a file or folder."""
        path = "/".join(parts)
        return any(held == path or held.startswith(f"{path}/") for held in self._look().sizes)

    def size(self, *parts: str) -> int:
        """Bytes of a file."""
        return self._holding("/".join(parts)).sizes["/".join(parts)]

    def read(self, *parts: str) -> bytes:
        """All bytes of a file."""
        return self.open(*parts).getvalue()

    def sha256(self, *parts: str) -> str:
        """The SHA-256 of a file, as `sha256sum` prints it."""
        return hashlib.sha256(self.open(*parts).getbuffer()).hexdigest()

    def open(self, *parts: str) -> io.BytesIO:
        """A file, copied into the memory of this process; the copy on its own node is preferred.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: no store of a copy answers.
        """
        path = "/".join(parts)
        try:
            return self._copied(path)
        except FileNotFoundError:
            raise
        except OSError:  # who had it may have died since the last look
            self._seen = None
            return self._copied(path)

    def write(self, data: bytes, *parts: str) -> None:
        """Writes a file whole or not at all."""
        with self.create(*parts) as stream:
            stream.write(data)

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        """Opens a new file for writing that appears, whole, when the block ends without error.

        Raises:
            OSError: a store has died or has no room.
        """
        path = "/".join(parts)
        group = group_of(path.partition("/")[0])
        upload = _Upload(self._assigned_stores(group), path)
        try:
            yield cast("IO[bytes]", upload)
            upload.finish()
        except BaseException:
            for answer in [store.delete.remote(path) for store in upload.stores]:
                with suppress(OSError):
                    answered(answer, _ANSWER_SECONDS)
            raise

    def delete(self, *parts: str) -> None:
        """Deletes a file, or a folder with all that is in it; nothing happens where it is gone."""
        self._ask(_ANSWER_SECONDS, "delete", "/".join(parts))
        self._seen = None

    def usage(self) -> dict[str, int]:
        """Bytes held on every node that has a store, by the node's id."""
        return cast("dict[str, int]", self._ask(_ANSWER_SECONDS, "usage"))

    def _copied(self, path: str) -> io.BytesIO:
        listing = self._holding(path)
        problem = OSError()
        for node in sorted(listing.holders[path], key=lambda node: node != self.node):
            try:
                return _fetched(listing.stores[node], path, listing.sizes[path])
            except OSError as error:
                problem = error
        raise problem

    def _assigned_stores(self, group: str) -> list[Any]:
        """Return the stores for this node's files.

        They may take a minute to start; a registry that does not answer for seconds is given up.
        """
        answer = self.registry.assign.remote(self.node, group)
        deadline = time.monotonic() + START_SECONDS + _ANSWER_SECONDS
        while not ray.wait([answer], timeout=_FIRST_LOOK_SECONDS)[0]:
            if time.monotonic() > deadline:
                break
            self._ask(_ANSWER_SECONDS, "ping")
        return cast("list[Any]", answered(answer, 0.0))

    def _holding(self, path: str) -> Listing:
        """A listing that has the file."""
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
        return answered(getattr(self.registry, question).remote(*args), seconds)


def open_replicas(limit_bytes: int, answer_seconds: float = ANSWER_SECONDS) -> Replicas:
    """New, empty replicas; they last as long as the process that calls this.

    Args:
        limit_bytes: most that is held on any one node. Two states of the run, the newest and the
            one being saved, twice over where there are several nodes, divided by the nodes.
        answer_seconds: a store that takes longer is passed over.
    """
    return Replicas(start_registry(limit_bytes, answer_seconds))


def close_replicas(storage: Replicas) -> None:
    """Ends the registry and with it all stores; nothing happens where they have ended."""
    ray.kill(storage.registry)


def newest_replica(
    storage: CommitStorage, counts: Callable[[int, int], bool] = lambda attempt, step: True
) -> Commit | None:
    """The newest commit whose every file is there; None where there is none or nobody answers.

    It answers within some seconds and never raises."""
    with suppress(Exception):
        for commit in commits(storage):
            if counts(*commit.place) and not size_problems(storage, commit):
                return commit
    return None


def _fetched(store: Any, path: str, size: int) -> io.BytesIO:
    stream = io.BytesIO()
    for index in range(-(-size // CHUNK_BYTES)):
        stream.write(answered(store.chunk.remote(path, index), _ANSWER_SECONDS))
    stream.seek(0)
    return stream


class _Upload(io.RawIOBase):
    """A stream for writing; what goes into it is a file when `finish` returns."""

    def __init__(self, stores: list[Any], path: str) -> None:
        self.stores = stores
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
        if self._filled:
            self._send()
        while self._under_way:
            self._wait()
        answers = [store.finish.remote(self._path, self._sent) for store in self.stores]
        for answer in answers:
            answered(answer, _CHUNK_SECONDS)

    def _send(self) -> None:
        if len(self._under_way) >= _CHUNKS_UNDER_WAY:
            self._wait()
        # put() copies, so the buffer is free again, and both stores read one object.
        chunk = ray.put(self._chunk[: self._filled])
        answers = [store.append.remote(self._path, self._sent, chunk) for store in self.stores]
        self._under_way.append(answers)
        self._sent += 1
        self._filled = 0

    def _wait(self) -> None:
        for answer in self._under_way.popleft():
            answered(answer, _CHUNK_SECONDS)
