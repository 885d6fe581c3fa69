"""The store of in-memory checkpoints on a node: an actor that holds files in its own memory.

`answered` returns its answers within seconds or raises an OSError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

CHUNK_BYTES = 16 * 2**20
"""Size of the chunks in which files are sent, so that no step needs memory for a whole file."""
PART = ".part"
"""Suffix of the names of unfinished files."""
_STATES = 2
"""States that a store holds: the newest copy stays until the next one is complete."""

Chunk = NDArray[np.uint8]


@ray.remote(num_cpus=0, concurrency_groups={"answers": 1})  # type: ignore[call-overload]
class ReplicaStore:
    """Files by path, in chunks of bytes.

    Queries have a separate thread, so that they are answered while chunks arrive. Requests that
    change files are executed in the caller's order.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._files: dict[str, dict[int, Chunk]] = {}
        self._spare: list[Chunk] = []
        self._used = 0
        self._lock = Lock()

    def append(self, path: str, index: int, chunk: Chunk) -> None:
        """Take a chunk of the unfinished file `path`.

        Raises:
            OSError: the limit of bytes is reached.
        """
        # Copied, because Ray's own objects die with the worker that sent them.
        buffer = self._room_for(chunk.nbytes)
        np.copyto(buffer, chunk)
        with self._lock:
            self._files.setdefault(path + PART, {})[index] = buffer

    def finish(self, path: str, chunks: int) -> None:
        """Turn the chunks received for `path` into a file.

        Raises:
            OSError: chunks are missing, because the file was deleted meanwhile.
        """
        with self._lock:
            parts = self._files.get(path + PART, {})
            if len(parts) != chunks:
                raise OSError(f"{path}: {len(parts)} of {chunks} chunks have arrived")
            self._files[path] = self._files.pop(path + PART, {})

    @ray.method(concurrency_group="answers")
    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file by path, with unfinished ones, whose names end in
        `.part`."""
        with self._lock:
            return {
                path: sum(chunk.nbytes for chunk in chunks.values())
                for path, chunks in self._files.items()
            }

    @ray.method(concurrency_group="answers")
    def used(self) -> int:
        """Return the bytes of all chunks."""
        with self._lock:
            return self._used

    @ray.method(concurrency_group="answers")
    def chunk(self, path: str, index: int) -> Chunk:
        """Return a chunk of a finished file.

        Raises:
            FileNotFoundError: the file does not exist, or no longer.
        """
        with self._lock:
            if path not in self._files:
                raise FileNotFoundError(path)
            # Copied, because the buffer may be refilled once the file is deleted.
            return self._files[path][index].copy()

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its contents, finished or not."""
        with self._lock:
            for name in [name for name in self._files if _is_below(name, path)]:
                self._free(*self._files.pop(name).values())

    def _free(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            self._used -= chunk.nbytes
            # Only full chunks have the same size and are worth keeping.
            if chunk.nbytes == CHUNK_BYTES:
                self._spare.append(chunk)

    def _room_for(self, size: int) -> Chunk:
        """Return a buffer, preferably a used one.

        Raises:
            OSError: the limit of bytes is reached.
        """
        with self._lock:
            if self._used + size > self._limit_bytes:
                raise OSError(
                    f"no room for {size} more bytes: {self._used} of {self._limit_bytes} are taken"
                )
            self._used += size
            # Fresh memory costs more: the kernel has to map and zero every page.
            if size == CHUNK_BYTES and self._spare:
                return self._spare.pop()
        return np.empty(size, np.uint8)


def start_store(limit_bytes: int, scheduling: Any) -> Any:
    """Return the handle of a new store, which lives as long as the process that starts it."""
    options: Callable[..., Any] = ReplicaStore.options  # type: ignore[attr-defined]
    return options(scheduling_strategy=scheduling).remote(limit_bytes)


def _is_below(name: str, path: str) -> bool:
    return name in (path, path + PART) or name.startswith(f"{path}/")


def get_answer(answer: Any, seconds: float) -> Any:
    """Return the value of `answer`, an object reference.

    Raises:
        FileNotFoundError: the actor raised it.
        OSError: the actor has failed, has died, or does not answer within `seconds`.
    """
    try:
        return ray.get(answer, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise OSError(f"no answer within {seconds:g} s") from None
    except ray.exceptions.RayTaskError as error:
        kind = FileNotFoundError if isinstance(error.cause, FileNotFoundError) else OSError
        raise kind(str(error.cause)) from None
    except ray.exceptions.RayError as error:
        raise OSError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from None


def most_per_node(parts: Sequence[tuple[str, int]]) -> int:
    """Return the most bytes that any store has to hold.

    Args:
        parts: node and bytes of every rank's part. The store of a writing node takes the parts of
            its own writers and of those on the previous node in the ring. If only one node writes,
            a store on another node may take its parts.
    """
    own: dict[str, int] = {}
    for node, size in parts:
        own[node] = own.get(node, 0) + size
    ring = sorted(own)
    if len(ring) == 1:
        return _STATES * own[ring[0]]
    # Sorted, the ring has the order in which `ring_from` assigns second copies.
    return _STATES * max(own[node] + own[ring[place - 1]] for place, node in enumerate(ring))
