"""The history of a run: what every step did, kept beside the checkpoints, through all restarts.

It is written in parts, a line an entry: by rank 0 of every group of workers as
`<attempt>-<part>.jsonl`, by the driver, which learns of lost groups, as `<attempt>-d<part>.jsonl`.
What a commit contains is in the history before the commit is begun.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Lock, Thread
from typing import Any, Self

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

PART_SECONDS = 15.0
"""Entries that no commit waits for are written this often: each part is a file."""

_PART = re.compile(r"(?P<attempt>\d{4,})-(?P<writer>[a-z]*)(?P<part>\d{8,})\.jsonl")
_READ_THREADS = 8
_Types = dict[str, type | tuple[type, ...]]
_KEYS_OF_ALL: _Types = {"attempt": int, "time": (int, float)}
_KEYS: dict[str, _Types] = {
    "started": {"step": int, "world_size": int},
    "step": {
        "step": int,
        "samples": int,
        "tokens": int,
        "batch_samples": int,
        "world_size": int,
        "digest": str,
        "loss": (int, float),
        "seconds": (int, float),
    },
    "evaluated": {"step": int},
    "rolled_back": {"first": int, "last": int},
    "halted": {"reason": str},
    "ended": {"status": str},
    "substituted": {"text": str},
}
"""What readers of the history compute with, by kind of entry; other kinds have more freedom."""


@dataclass(frozen=True, order=True)
class PartName:
    """The name of a part. Sorted, the parts are in the order of the history."""

    attempt: int
    writer: str
    """Empty for rank 0; a letter for any other writer."""
    part: int

    def __str__(self) -> str:
        return f"{self.attempt:04d}-{self.writer}{self.part:08d}.jsonl"

    @property
    def next(self) -> Self:
        """The one after it, of the same writer."""
        return type(self)(self.attempt, self.writer, self.part + 1)

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The parts of a file's name; None for a file that a killed writer or a user left."""
        found = _PART.fullmatch(name)
        if not found:
            return None
        return cls(int(found["attempt"]), found["writer"], int(found["part"]))


def next_attempt(storage: Storage) -> int:
    """1 for a new run, then one more for every group of workers that wrote into the history."""
    return max((part.attempt for part in _parts(storage)), default=0) + 1


def starts(storage: Storage) -> Callable[[int], dict[int, int]]:
    """Tells, for an attempt, at which step each later one began; only their first parts are read.

    An attempt that left no line on storage is not among them: the run knows nothing of it.
    """
    first = {p.attempt: str(p) for p in _parts(storage) if not p.writer and p.part == 0}

    @cache
    def start(attempt: int) -> int | None:
        lines = storage.read(first[attempt]).splitlines()
        entries = [_entry(line, storage.uri(first[attempt])) for line in lines]
        return next((entry["step"] for entry in entries if entry["kind"] == "started"), None)

    def later(attempt: int) -> dict[int, int]:
        found = {number: start(number) for number in first if number > attempt}
        return {number: step for number, step in found.items() if step is not None}

    return later


def read(storage: Storage) -> list[dict[str, Any]]:
    """All entries of all attempts, in the order they were written; an attempt's own before those
    that the driver wrote about it.

    Raises:
        UserError: a part was altered: torn, not JSON, or without the keys of its kind.
    """
    names = [str(part) for part in _parts(storage)]
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        parts = pool.map(storage.read, names)
        return [
            _entry(line, f"{storage.uri(name)}, line {number}")
            for name, data in zip(names, parts, strict=True)
            for number, line in enumerate(data.splitlines(), start=1)
        ]


def _parts(storage: Storage) -> list[PartName]:
    return sorted(part for name in storage.names() if (part := PartName.parse(name)))


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        raise UserError(f"{where}: not JSON (torn or altered)") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise UserError(f"{where}: not an entry of a history (altered)")
    for key, kind in (_KEYS_OF_ALL | _KEYS.get(entry["kind"], {})).items():
        if not isinstance(entry.get(key), kind):
            raise UserError(f"{where}: '{entry['kind']}' with a bad '{key}' (altered)")
    return entry


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
    found: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["kind"] == "started":
            found = [one for one in found if one["step"] <= entry["step"]]
        elif entry["kind"] == kind:
            found.append(entry)
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
        held = storage.read(str(part))
        data = data[len(held) :] if data.startswith(held) else b""
        part = part.next
    if data:
        storage.write(data, str(part))
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
        self._written = time.monotonic()
        self._of_lines, self._of_storage = Lock(), Lock()

    def unwritten(self) -> tuple[str, bytes]:
        """The lines that are not on storage yet, after the name of the part they will be in."""
        with self._of_lines:
            return str(self._next), b"".join(self._lines)

    def add(self, kind: str, entry: Mapping[str, Any]) -> None:
        """Adds an entry; it is on storage after the next `flush`, or some seconds later."""
        now = round(time.time(), 3)
        line = {"kind": kind, "attempt": self._next.attempt, "time": now, **entry}
        with self._of_lines:
            self._lines.append(json.dumps(line).encode() + b"\n")
            is_time = time.monotonic() - self._written > PART_SECONDS
            if is_time:
                self._written = time.monotonic()
        if is_time:
            Thread(target=self.flush, name="elastrata-history", daemon=True).start()

    def flush(self) -> None:
        """Writes what has been added since the last time, and waits for it."""
        with self._of_storage:
            with self._of_lines:
                lines, part = list(self._lines), self._next
                self._written = time.monotonic()
            if not lines:
                return
            try:
                self._storage.write(b"".join(lines), str(part))
            except Exception as error:
                self._warn(f"history cannot be written to {self._storage.url} for now: {error}")
                return
            with self._of_lines:
                del self._lines[: len(lines)]
                self._next = part.next


def _after_the_last(storage: Storage, attempt: int, writer: str) -> PartName:
    known = [
        part.part for part in _parts(storage) if (part.attempt, part.writer) == (attempt, writer)
    ]
    return PartName(attempt, writer, max(known, default=-1) + 1)
