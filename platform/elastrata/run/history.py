"""The history of a run: what every step did, kept beside the checkpoints, through all restarts.

It is written in parts, a line an entry: by rank 0 of every group of workers as
`<attempt>-<part>.jsonl`, by the driver, which learns of lost groups, as `<attempt>-d<part>.jsonl`.
What a commit contains is in the history before the commit is begun.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from elastrata.run.chain import Chain, check_chain, foreign_parts
from elastrata.run.entries import parse_entry
from elastrata.run.lineage import Lineage
from elastrata.run.parts import (
    Link,
    Part,
    PartName,
    is_seal,
    link_before,
    part_names,
    read_head,
    read_part,
    sealed,
    write_head,
)
from elastrata.run.process import here
from elastrata_pipelines.storage import Storage

PART_SECONDS = 15.0
"""Entries that no commit waits for are written this often: each part is a file."""

_READ_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class History:
    """All of a history, and whether it is as it was written."""

    entries: list[dict[str, Any]]
    """Those of the parts that belong to it, in the order they were written; an attempt's own before
    those that the driver wrote about it."""
    chain: Chain


def next_attempt(storage: Storage) -> int:
    """1 for a new run, then one more for every group of workers that wrote into the history."""
    return max((part.attempt for part in part_names(storage)), default=0) + 1


def read(storage: Storage) -> list[dict[str, Any]]:
    """The entries of a history, see `look`."""
    return look(storage).entries


def look(storage: Storage, heads: Iterable[tuple[str, Link]] = ()) -> History:
    """Reads a history.

    Args:
        storage: its folder.
        heads: what others know of parts that must be there, after a word for who they are.

    Raises:
        UserError: a part was altered: torn, not JSON, or with a value that cannot be.
    """
    parts = read_parts(storage)
    known = [(f"{writer}head.json", read_head(storage, writer)) for writer in ("", "d")]
    chain = check_chain(
        parts, [*heads, *((who, link) for who, link in known if link)], storage.uri()
    )
    return History(entries=entries_of(storage, parts, chain.foreign), chain=chain)


def read_lineage(storage: Storage) -> Lineage:
    """Which states count, by as few parts as tell it: the first of every attempt, and the driver's.

    Raises:
        UserError: one of them was altered.
    """
    parts = read_parts(storage, lambda name: bool(name.writer) or name.part == 0)
    lineage = Lineage()
    for entry in entries_of(storage, parts, foreign_parts(parts)):
        lineage.event(entry)
    return lineage


def read_told(storage: Storage, kind: str) -> list[dict[str, Any]]:
    """The driver's entries of a kind, by its own parts alone.

    Raises:
        UserError: one of them was altered.
    """
    parts = read_parts(storage, lambda name: bool(name.writer))
    entries = entries_of(storage, parts, foreign_parts(parts))
    return [entry for entry in entries if entry["kind"] == kind]


def read_parts(
    storage: Storage, wanted: Callable[[PartName], bool] = lambda name: True
) -> list[Part]:
    """The parts that are wanted, in order, without a look at their lines.

    Raises:
        UserError: one is no file, or cannot be read.
    """
    names = [name for name in part_names(storage) if wanted(name)]
    if len(names) <= _READ_THREADS and storage.is_local:  # threads would take longer to start
        return [read_part(storage, name) for name in names]
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        return list(pool.map(partial(read_part, storage), names))


def entries_of(
    storage: Storage, parts: Iterable[Part], without: Container[PartName] = ()
) -> list[dict[str, Any]]:
    """The entries of parts, in order.

    Raises:
        UserError: a line was altered.
    """
    return [
        parse_entry(line, f"{storage.uri(str(part.name))}, line {number}")
        for part in parts
        if part.name not in without
        for number, line in enumerate(part.lines, start=1)
        if not is_seal(line)
    ]


def surviving_steps(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that no later attempt rolled back, in the order they were done.

    In a sound history they are 1, 2, 3...; in one that is not, steps are missing or twice there.
    """
    return _surviving(entries, "step")


def surviving_evaluations(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The evaluations of the steps that no later attempt rolled back, in order."""
    return _surviving(entries, "evaluated")


def _surviving(entries: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """The entries of that kind, each about a step, that no later attempt went back behind."""
    lineage, found, seen = Lineage(), list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for entry in entries:
        if entry["kind"] == kind:
            found.append(entry)
            seen.append(entry)
        elif event := lineage.event(entry):
            found = lineage.left(event, found, seen)
    return found


def effective_steps(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that made the model what it is, each once: those a later attempt rolled back are
    left out."""
    steps = {entry["step"]: entry for entry in surviving_steps(entries)}
    return [steps[step] for step in sorted(steps)]


def world_sizes(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """World size of every group of workers that was ready for a step, in order."""
    return [entry["world_size"] for entry in entries if entry["kind"] == "started"]


def restore_part(storage: Storage, name: str, data: bytes) -> bool:
    """Writes a part that its own writer could not, because it was killed first.

    Args:
        storage: the run's folder of history.
        name: what the writer's `part_name` was.
        data: what its `pending` was.

    Returns:
        Whether anything was written. Parts that are there are left as they are: their writer came
        as far, or further. What they lack goes into the part after them.

    Raises:
        ValueError: that is no name of a part.
    """
    part = PartName.parse(name)
    if part is None:
        raise ValueError(f"{name}: expected the name of a part, such as {PartName(1, '', 0)}")
    while data and storage.exists(str(part)):
        held = b"".join(read_part(storage, part).lines)
        data = data[len(held) :] if data.startswith(held) else b""
        part = part.next
    if data:
        storage.write(sealed(part, data, link_before(storage, part))[0], str(part))
    return bool(data)


class HistoryWriter:
    """Writes the history of one attempt, or what the driver has to say about it.

    Any thread may use it. Adding never waits for storage. It never writes over a part of another
    writer, and goes on after the last one of its own name.

    Args:
        storage: the run's folder of history.
        attempt: from `next_attempt`.
        warn: called with one line where storage does not take a part; it is tried again later.
        writer: a letter that tells its parts from those of rank 0, whose letter is none.
    """

    def __init__(
        self, storage: Storage, attempt: int, warn: Callable[[str], None], writer: str = ""
    ) -> None:
        self._warn = warn
        self._storage = storage
        self._lines: list[bytes] = []
        self._next = _after_the_last(storage, attempt, writer)
        self._before: Link | None = None
        self._is_linked = False
        self._written = time.monotonic()
        self._of_lines, self._of_storage = Lock(), Lock()

    def unwritten(self) -> tuple[str, bytes]:
        """The lines that are not on storage yet, after the name of the part they will be in."""
        with self._of_lines:
            return str(self._next), b"".join(self._lines)

    @property
    def head(self) -> Link | None:
        """The part that it wrote last, or goes on after."""
        with self._of_lines:
            return self._before

    def add(self, kind: str, entry: Mapping[str, Any]) -> None:
        """Adds an entry; it is on storage after the next `flush`, or some seconds later."""
        now = {
            "time": round(time.time(), 3),
            "clock": monotonic_clock(),
            "monotonic": round(time.monotonic(), 6),
        }
        if "time" in entry:  # of another moment
            now = {}
        line = {"kind": kind, "attempt": self._next.attempt, **now, **entry}
        with self._of_lines:
            self._lines.append(json.dumps(line).encode() + b"\n")
            is_time = time.monotonic() - self._written > PART_SECONDS
            if is_time:
                self._written = time.monotonic()
        if is_time:
            Thread(target=self.flush, name="elastrata-history", daemon=True).start()

    def flush(self) -> bool:
        """Writes what has been added since the last time, and waits for it.

        Returns:
            Whether storage has all that had been added by then.
        """
        with self._of_storage:
            with self._of_lines:
                lines, part = list(self._lines), self._next
                self._written = time.monotonic()
            if not lines:
                return True
            try:
                if not self._is_linked:
                    self._before, self._is_linked = link_before(self._storage, part), True
                data, link = sealed(part, b"".join(lines), self._before)
                self._storage.write(data, str(part))
            except Exception as error:
                self._warn(f"history cannot be written to {self._storage.url} for now: {error}")
                return False
            with self._of_lines:
                del self._lines[: len(lines)]
                self._next, self._before = part.next, link
            with suppress(Exception):  # the next one will be noted
                write_head(self._storage, part.writer, link)
            return True


@cache
def monotonic_clock() -> str:
    """Return a name for the clock that `time.monotonic` reads: one name, one clock.

    On Linux that is the host's, until it is started anew: its processes have one time, however
    often the wall clock is set. Where the system does not say so, every process has its own.
    """
    boot_id, _ = here()
    if boot_id is None:
        return uuid.uuid4().hex[:8]
    with suppress(OSError):  # a container may have its own offset
        boot_id += str(Path("/proc/self/ns/time").readlink())
    return sha256(boot_id.encode()).hexdigest()[:8]


def _after_the_last(storage: Storage, attempt: int, writer: str) -> PartName:
    known = [
        part.part
        for part in part_names(storage)
        if (part.attempt, part.writer) == (attempt, writer)
    ]
    return PartName(attempt, writer, max(known, default=-1) + 1)
