"""The history of a run: what every step did, kept beside the checkpoints, through all restarts.

It is written in parts, a line an entry: by rank 0 of every group of workers as
`<attempt>-<part>.jsonl`, by the driver, which learns of lost groups, as `<attempt>-d<part>.jsonl`.
What a commit contains is in the history before the commit is begun: lines that no part has yet
travel in the commit, and the next attempt writes them.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Self

from pydantic import NonNegativeInt

from elastrata.checkpoints.commit import Commit, FolderName, folders
from elastrata.run.entries import parse_entry
from elastrata.run.process import here
from elastrata_pipelines.checked_json import (
    Record,
    list_names,
    parse_record,
    read_bytes,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """Where the run went on from."""

    attempt: int
    """Who went on, or returned."""
    step: int
    origin: int | None
    """The attempt that was returned to; None: the one before."""


class Lineage:
    """The states that count, event by event in the order of the history."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def event(self, entry: Entry) -> Event | None:
        """Takes an entry; None where it changes nothing."""
        if entry["kind"] not in ("started", "returned"):
            return None
        folder = FolderName.parse(entry.get("commit", "")) if entry["kind"] == "returned" else None
        event = Event(entry["attempt"], entry["step"], folder.attempt if folder else None)
        self._events.append(event)
        return event

    def left(self, event: Event, counting: Sequence[Entry], seen: Sequence[Entry]) -> list[Entry]:
        """The entries that count after the newest event.

        Args:
            event: the newest.
            counting: entries, each about a step, that counted before it.
            seen: all that there were before it.
        """
        if event.origin is None:
            return [entry for entry in counting if entry["step"] <= event.step]
        return [entry for entry in seen if self.counts(entry["attempt"], entry["step"])]

    def counts(self, attempt: int, step: int) -> bool:
        """Whether a state of that attempt, after that step, is one of the run's as it is now."""
        return self.contradiction(attempt, step) is None

    def contradiction(self, attempt: int, step: int) -> Event | None:
        """The newest event by which that state counts no more; None: it counts.

        An attempt without an event left no line on storage: the run knows nothing of it.
        """
        newest = None
        for event in reversed(self._events):
            if event.attempt <= attempt and event.origin is None:
                return None
            if newest is not None and event.attempt > newest:
                continue  # returned behind it
            if step > event.step:
                return event
            if event.origin is not None:
                newest = event.origin
                if newest < attempt:
                    return event
        return None


SEALED = "sealed"
"""Kind of the line that ends a part, with the checksum of the lines above."""
SET_ASIDE = "set_aside"
"""The folder of the history for parts that do not belong to it."""
_SEAL_START = b'{"kind": "sealed"'
_PART_PATTERN = re.compile(r"(?P<attempt>[0-9]{4,9})-(?P<writer>d?)(?P<part>[0-9]{8})\.jsonl")


@dataclass(frozen=True, order=True)
class PartName:
    """The name of a part. Sorted, the parts are in the order of the history."""

    attempt: int
    writer: str
    """Empty for rank 0; `d` for the driver."""
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
        found = _PART_PATTERN.fullmatch(name)
        if not found:
            return None
        parsed = cls(int(found["attempt"]), found["writer"], int(found["part"]))
        return parsed if str(parsed) == name else None


class Seal(Record):
    """The last line of a part. Histories of earlier versions have none."""

    kind: str = SEALED
    part: str
    """The name of the part itself."""
    before: Any = None
    """Earlier versions linked each part to the one before it; not checked."""
    lines: NonNegativeInt
    sha256: str
    """The checksum of the lines above."""


@dataclass(frozen=True)
class Part:
    """A part as it is read."""

    name: PartName
    lines: tuple[bytes, ...]
    """Without the seal; each as it is, with its end."""
    seal: Seal | None
    """None: it has none, or none that can be read."""

    @property
    def foreign_reason(self) -> str:
        """Return why it does not belong to this place in the history; empty if it does."""
        if self.seal:
            own = self.seal.part
            return f"a copy of {own}" if own != str(self.name) else ""
        attempt = _first_attempt(self) if not self.name.writer else None
        is_other = attempt not in (None, self.name.attempt)
        return f"its lines are of attempt {attempt}" if is_other else ""

    @property
    def has_torn_seal(self) -> bool:
        """Whether a line looks like a seal and is none, or has lines after it."""
        return any(is_seal(line) for line in self.lines)


def is_seal(line: bytes) -> bool:
    """Whether a line is a seal, whole or torn."""
    return line.startswith(_SEAL_START)


def digest(lines: Iterable[bytes]) -> str:
    """The SHA-256 of lines, as `sha256sum` prints it."""
    return hashlib.sha256(b"".join(lines)).hexdigest()


def sealed(name: PartName, lines: bytes) -> bytes:
    """Return the bytes of a part of that name: its lines and their seal."""
    number = len(lines.splitlines())
    seal = Seal(part=str(name), lines=number, sha256=digest([lines]))
    return lines + json.dumps(seal.model_dump(exclude={"before"})).encode() + b"\n"


def parse_part(name: PartName, data: bytes) -> Part:
    """A part from its bytes. Its lines are not looked at."""
    lines = tuple(data.split(b"\n"))
    whole = tuple(line + b"\n" for line in lines[:-1]) + ((lines[-1],) if lines[-1] else ())
    if not whole or not is_seal(whole[-1]):
        return Part(name, whole, None)
    try:
        return Part(name, whole[:-1], parse_record(Seal, whole[-1], str(name)))
    except UserError:
        return Part(name, whole, None)


def read_part(storage: Storage, name: PartName) -> Part:
    """A part of a history.

    Raises:
        UserError: it is no file, or cannot be read.
    """
    try:
        return parse_part(name, read_bytes(storage, str(name)))
    except FileNotFoundError:
        raise UserError(f"{storage.uri(str(name))}: a link to nothing, expected a file") from None


def part_names(storage: Storage) -> list[PartName]:
    """The names of all parts, in order.

    Raises:
        UserError: the history is no folder.
    """
    return sorted(part for name in list_names(storage) if (part := PartName.parse(name)))


def _first_attempt(part: Part) -> int | None:
    """Return the attempt that the first line names."""
    try:
        named = json.loads(part.lines[0])["attempt"]
    except (IndexError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return named if isinstance(named, int) else None


def _part_problems(storage: Storage, parts: Sequence[Part]) -> Iterator[str]:
    """Yield a line for each part that is not as it was written, or is missing between others."""
    is_sealed = {part.name.writer: False for part in parts}
    for part in parts:
        where, seal = storage.uri(str(part.name)), part.seal
        if part.foreign_reason:
            yield foreign_line(storage, part.name, part.foreign_reason)
        elif seal and (seal.lines, seal.sha256) != (len(part.lines), digest(part.lines)):
            yield f"{where}: altered: its lines are not those that were sealed"
        elif part.has_torn_seal:
            yield f"{where}: altered: its seal is not its last line, or torn"
        elif not part.lines and not seal:
            yield f"{where}: empty: its lines are lost"
        elif not seal and is_sealed[part.name.writer]:
            yield f"{where}: altered: it has no seal"
        is_sealed[part.name.writer] |= seal is not None
    for name in _missing(storage, [part.name for part in parts if not part.foreign_reason]):
        yield f"{storage.uri(str(name))}: missing: there are later parts of its writer"


def _missing(storage: Storage, names: Sequence[PartName]) -> list[PartName]:
    """Return the first part of every gap in the numbers of an attempt's writer."""
    firsts = {PartName(name.attempt, name.writer, 0) for name in names}
    gaps = (firsts | {name.next for name in names}) - set(names)
    last = {(name.attempt, name.writer): name.part for name in names}
    gaps = {name for name in gaps if name.part < last[name.attempt, name.writer]}
    if gaps:
        gaps -= {name for text in list_names(storage, SET_ASIDE) if (name := PartName.parse(text))}
    return sorted(gaps)


def foreign_line(storage: Storage, name: PartName, why: str) -> str:
    """Return the line that says why a part does not belong to the history."""
    return f"{storage.uri(str(name))}: not of this history: {why}"


FORKED = "forked"
"""The kind of the entry, in a fork's history, that names its parent."""
_PART, _LINES, _HEAD = "history_part", "history_lines", "history_head"
"""Keys of a commit's `extra`; earlier versions wrote the last one, too."""
PART_SECONDS = 15.0
"""Entries that no commit waits for are written this often: each part is a file."""
_READ_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class History:
    """All of a history, and whether it is as it was written."""

    entries: list[dict[str, Any]]
    """Those of the parts that belong to it, in the order they were written; an attempt's own before
    those that the driver wrote about it."""
    foreign: tuple[str, ...]
    """A line for each part that does not belong to it."""
    problems: tuple[str, ...]
    """A line for each thing that is not as it was written, foreign parts included."""


def next_attempt(storage: Storage) -> int:
    """1 for a new run, then one more for every group of workers that wrote into the history."""
    return max((part.attempt for part in part_names(storage)), default=0) + 1


def read(storage: Storage) -> list[dict[str, Any]]:
    """The entries of a history, see `look`."""
    return look(storage).entries


def look(storage: Storage) -> History:
    """Read a history.

    Raises:
        UserError: a part was altered: torn, not JSON, or with a value that cannot be.
    """
    parts = read_parts(storage)
    return History(
        entries=entries_of(storage, parts),
        foreign=tuple(
            foreign_line(storage, part.name, part.foreign_reason)
            for part in parts
            if part.foreign_reason
        ),
        problems=tuple(_part_problems(storage, parts)),
    )


def read_lineage(storage: Storage) -> Lineage:
    """Which states count, by as few parts as tell it: the first of every attempt, and the driver's.

    Raises:
        UserError: one of them was altered.
    """
    parts = read_parts(storage, lambda name: bool(name.writer) or name.part == 0)
    lineage = Lineage()
    for entry in entries_of(storage, parts):
        lineage.event(entry)
    return lineage


def read_told(storage: Storage, kind: str) -> list[dict[str, Any]]:
    """The driver's entries of a kind, by its own parts alone.

    Raises:
        UserError: one of them was altered.
    """
    parts = read_parts(storage, lambda name: bool(name.writer))
    entries = entries_of(storage, parts)
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


def entries_of(storage: Storage, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the entries of the parts that belong to the history, in order.

    Raises:
        UserError: a line was altered.
    """
    return [
        parse_entry(line, f"{storage.uri(str(part.name))}, line {number}")
        for part in parts
        if not part.foreign_reason
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
        storage.write(sealed(part, data), str(part))
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
                self._storage.write(sealed(part, b"".join(lines)), str(part))
            except Exception as error:
                self._warn(f"history cannot be written to {self._storage.url} for now: {error}")
                return False
            with self._of_lines:
                del self._lines[: len(lines)]
                self._next = part.next
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


def take_over(run: Storage, commit: Commit | None) -> int:
    """Makes the history whole that the next attempt goes on with.

    Lines that died with the worker who had yet to write them, and travelled in the commit, are
    written.

    Args:
        run: its folder.
        commit: what it continues from; None: nothing, or another run's.

    Returns:
        The number of the attempt, higher than that of any before.
    """
    storage = run.sub("history")
    if commit:
        restore_history(storage, commit)
    return max(next_attempt(storage), _last_saved(run.sub("checkpoints")) + 1)


def _last_saved(checkpoints: Storage) -> int:
    """The last attempt that has saved; 0 for none, or where the folder is none any more: then the
    run goes on from memory, and its history knows the attempts."""
    try:
        return max((folder.attempt for folder in folders(checkpoints)), default=0)
    except UserError:
        return 0


def unwritten(writer: HistoryWriter) -> dict[str, Any]:
    """Return the unwritten lines, for a commit's `extra`."""
    part, lines = writer.unwritten()
    return {_PART: part, _LINES: lines.decode()}


def restore_history(storage: Storage, commit: Commit) -> None:
    """Writes the lines that travelled in a commit; nothing happens where they are there.

    Args:
        storage: the run's folder of history.
        commit: of any tier.
    """
    part, lines = commit.extra.get(_PART), commit.extra.get(_LINES)
    if isinstance(part, str) and isinstance(lines, str) and PartName.parse(part):
        restore_part(storage, part, lines.encode())


def without_history(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A commit's `extra` without what travels in it of its run's history."""
    return {key: value for key, value in extra.items() if key not in (_PART, _LINES, _HEAD)}


def unwritten_entries(commit: Commit) -> list[dict[str, Any]]:
    """Return the entries of the history that travel in a commit.

    Raises:
        UserError: one was altered.
    """
    lines = commit.extra.get(_LINES)
    where = f"checkpoint {commit.folder}"
    return [parse_entry(line.encode(), where) for line in str(lines or "").splitlines()]
