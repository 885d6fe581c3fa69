"""The history of a run: one JSON line per event, kept next to the checkpoints across all restarts.

The history is stored in parts. Rank 0 of every group of workers writes `<attempt>-<part>.jsonl`;
the driver, which learns of lost groups, writes `<attempt>-d<part>.jsonl`. Before a commit begins,
every line about its steps is either in a part or travels inside the commit; in the second case the
next attempt writes these lines.
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

from elastrata.checkpoints.commit import Commit, FolderName, list_folders
from elastrata.run.entries import parse_entry
from elastrata.run.process import host_identity
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
    """The state from which a run continued."""

    attempt: int
    """The attempt that continued, or the number given to a user's return to a checkpoint."""
    step: int
    origin: int | None
    """The attempt of the checkpoint that was returned to; None: the previous attempt."""


class Lineage:
    """The states that are part of the run's current past, derived from its history in order."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def event(self, entry: Entry) -> Event | None:
        """Read one entry; return the event that it describes, or None if it describes none."""
        if entry["kind"] not in ("started", "returned"):
            return None
        folder = FolderName.parse(entry.get("commit", "")) if entry["kind"] == "returned" else None
        event = Event(entry["attempt"], entry["step"], folder.attempt if folder else None)
        self._events.append(event)
        return event

    def left(self, event: Event, counting: Sequence[Entry], seen: Sequence[Entry]) -> list[Entry]:
        """Return the entries that still count after the newest event.

        Args:
            event: the newest event.
            counting: entries about steps that counted before the event.
            seen: all entries about steps before the event.
        """
        if event.origin is None:
            return [entry for entry in counting if entry["step"] <= event.step]
        return [entry for entry in seen if self.counts(entry["attempt"], entry["step"])]

    def counts(self, attempt: int, step: int) -> bool:
        """Return whether the state of an attempt after a step is part of the run's current past."""
        return self.contradiction(attempt, step) is None

    def contradiction(self, attempt: int, step: int) -> Event | None:
        """Return the newest event that discarded a state, or None if the state still counts."""
        newest = None
        for event in reversed(self._events):
            # The attempt began after this event or with it. An attempt without any event left no
            # line on storage: the history knows nothing of it.
            if event.attempt <= attempt and event.origin is None:
                return None
            if newest is not None and event.attempt > newest:
                # A later return to an older checkpoint has already discarded this event.
                continue
            if step > event.step:
                return event
            if event.origin is not None:
                newest = event.origin
                if newest < attempt:
                    return event
        return None


SEALED = "sealed"
"""Kind of the last line of a part, which holds the checksum of the lines above it."""
SET_ASIDE = "set_aside"
"""Subfolder of the history for parts that do not belong to it."""
# A torn seal still begins with these bytes, so it is not mistaken for an entry.
_SEAL_START = b'{"kind": "sealed"'
_PART_PATTERN = re.compile(r"(?P<attempt>[0-9]{4,9})-(?P<writer>d?)(?P<part>[0-9]{8})\.jsonl")


@dataclass(frozen=True, order=True)
class PartName:
    """The name of a part; sorted names are in the order of the history."""

    attempt: int
    writer: str
    """Empty for rank 0; `d` for the driver."""
    part: int

    def __str__(self) -> str:
        return f"{self.attempt:04d}-{self.writer}{self.part:08d}.jsonl"

    @property
    def next(self) -> Self:
        """The name of the same writer's next part."""
        return type(self)(self.attempt, self.writer, self.part + 1)

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse a file name; return None for a file that a killed writer or a user left."""
        match = _PART_PATTERN.fullmatch(name)
        if not match:
            return None
        parsed = cls(int(match["attempt"]), match["writer"], int(match["part"]))
        return parsed if str(parsed) == name else None


class Seal(Record):
    """The last line of a part. Histories of earlier versions have no seals."""

    kind: str = SEALED
    part: str
    """The name of the part that the seal was written for."""
    before: Any = None
    """Earlier versions linked each part to the one before it; not checked."""
    lines: NonNegativeInt
    sha256: str
    """The SHA-256 of the lines above."""


@dataclass(frozen=True)
class Part:
    """One part as read from storage."""

    name: PartName
    lines: tuple[bytes, ...]
    """The lines without the seal, unparsed, each with its line end."""
    seal: Seal | None
    """None if the part has no seal or an unreadable one."""

    @property
    def foreign_reason(self) -> str:
        """Return why the part does not belong to this place in the history; empty if it does."""
        if self.seal:
            # A part that was copied from another place keeps the seal of the original.
            own = self.seal.part
            return f"a copy of {own}" if own != str(self.name) else ""
        # The driver writes about attempts of other numbers, so only rank 0's parts are checked.
        attempt = _first_attempt(self) if not self.name.writer else None
        is_other = attempt not in (None, self.name.attempt)
        return f"its lines are of attempt {attempt}" if is_other else ""

    @property
    def has_torn_seal(self) -> bool:
        """Whether a seal is damaged or is followed by further lines."""
        return any(is_seal(line) for line in self.lines)


def is_seal(line: bytes) -> bool:
    """Return whether a line is a seal, complete or torn."""
    return line.startswith(_SEAL_START)


def digest(lines: Iterable[bytes]) -> str:
    """Return the SHA-256 of the joined lines, as `sha256sum` prints it."""
    return hashlib.sha256(b"".join(lines)).hexdigest()


def seal_part(name: PartName, lines: bytes) -> bytes:
    """Return the bytes of a part: its lines followed by their seal."""
    number = len(lines.splitlines())
    seal = Seal(part=str(name), lines=number, sha256=digest([lines]))
    return lines + json.dumps(seal.model_dump(exclude={"before"})).encode() + b"\n"


def parse_part(name: PartName, data: bytes) -> Part:
    """Split bytes into the lines and the seal of a part, without parsing the lines."""
    lines = tuple(data.split(b"\n"))
    lines_with_ends = tuple(line + b"\n" for line in lines[:-1]) + (
        (lines[-1],) if lines[-1] else ()
    )
    if not lines_with_ends or not is_seal(lines_with_ends[-1]):
        return Part(name, lines_with_ends, None)
    try:
        # A seal that cannot be parsed stays among the lines, for `has_torn_seal` to report.
        return Part(name, lines_with_ends[:-1], parse_record(Seal, lines_with_ends[-1], str(name)))
    except UserError:
        return Part(name, lines_with_ends, None)


def read_part(storage: Storage, name: PartName) -> Part:
    """Read one part of a history.

    Raises:
        UserError: the part is not a file or cannot be read.
    """
    try:
        return parse_part(name, read_bytes(storage, str(name)))
    except FileNotFoundError:
        raise UserError(
            f"{storage.uri(str(name))}: a broken symbolic link, expected a file"
        ) from None


def part_names(storage: Storage) -> list[PartName]:
    """Return the names of all parts, in order.

    Raises:
        UserError: the history is not a folder.
    """
    return sorted(part for name in list_names(storage) if (part := PartName.parse(name)))


def _first_attempt(part: Part) -> int | None:
    """Return the attempt in the first line, or None if there is no valid one."""
    try:
        attempt = json.loads(part.lines[0])["attempt"]
    except (IndexError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return attempt if isinstance(attempt, int) else None


def _part_problems(storage: Storage, parts: Sequence[Part]) -> Iterator[str]:
    """Yield one line for each part that was altered, or that is missing between other parts."""
    is_sealed = {part.name.writer: False for part in parts}
    for part in parts:
        uri, seal = storage.uri(str(part.name)), part.seal
        if part.foreign_reason:
            yield foreign_line(storage, part.name, part.foreign_reason)
        elif seal and (seal.lines, seal.sha256) != (len(part.lines), digest(part.lines)):
            yield f"{uri}: altered: its lines do not match its seal"
        elif part.has_torn_seal:
            yield f"{uri}: altered: its seal is truncated or not its last line"
        elif not part.lines and not seal:
            yield f"{uri}: empty: its lines are lost"
        # Earlier versions wrote no seals: only a part after a sealed one must have a seal.
        elif not seal and is_sealed[part.name.writer]:
            yield f"{uri}: altered: it has no seal"
        is_sealed[part.name.writer] |= seal is not None
    for name in _find_missing(storage, [part.name for part in parts if not part.foreign_reason]):
        yield f"{storage.uri(str(name))}: missing, although its writer has later parts"


def _find_missing(storage: Storage, names: Sequence[PartName]) -> list[PartName]:
    """Return the first part of every gap in the numbering of each attempt's writers."""
    firsts = {PartName(name.attempt, name.writer, 0) for name in names}
    gaps = (firsts | {name.next for name in names}) - set(names)
    last = {(name.attempt, name.writer): name.part for name in names}
    gaps = {name for name in gaps if name.part < last[name.attempt, name.writer]}
    if gaps:
        # Parts that `go_back` set aside are expected to be missing.
        gaps -= {name for text in list_names(storage, SET_ASIDE) if (name := PartName.parse(text))}
    return sorted(gaps)


def foreign_line(storage: Storage, name: PartName, why: str) -> str:
    """Return the message for a part that does not belong to the history."""
    return f"{storage.uri(str(name))}: not of this history: {why}"


FORKED = "forked"
"""Kind of the entry in a fork's history that names the parent run."""
_PART, _LINES, _HEAD = "history_part", "history_lines", "history_head"
"""Keys of a commit's `extra`. Only earlier versions wrote `history_head`."""
# Every part is a file, so more frequent writing would leave many small ones.
PART_SECONDS = 15.0
"""Interval at which entries are written if no commit waits for them."""
_READ_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class History:
    """A complete history and the problems found in it."""

    entries: list[dict[str, Any]]
    """Entries of the parts that belong to the history, in order of writing. Within an attempt, the
    entries of its rank 0 precede those of the driver."""
    foreign: tuple[str, ...]
    """One line for each part that does not belong to the history."""
    problems: tuple[str, ...]
    """One line for each part that was altered, is missing or does not belong to the history."""


def next_attempt(storage: Storage) -> int:
    """Return 1 for a new run, else one more than the newest attempt in the history."""
    return max((part.attempt for part in part_names(storage)), default=0) + 1


def read_entries(storage: Storage) -> list[dict[str, Any]]:
    """Return the entries of a history; see `look`."""
    return read_history(storage).entries


def read_history(storage: Storage) -> History:
    """Read a history and check its parts.

    Raises:
        UserError: a line was altered: it is torn, not JSON, or has an impossible value.
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
    """Read the lineage of a run from as few parts as possible.

    Raises:
        UserError: one of these parts was altered.
    """
    # `started` is always in the first part of an attempt, `returned` always in one of the driver's.
    parts = read_parts(storage, lambda name: bool(name.writer) or name.part == 0)
    lineage = Lineage()
    for entry in entries_of(storage, parts):
        lineage.event(entry)
    return lineage


def read_driver_entries(storage: Storage, kind: str) -> list[dict[str, Any]]:
    """Return the driver's entries of one kind, read from the driver's parts alone.

    Raises:
        UserError: one of these parts was altered.
    """
    parts = read_parts(storage, lambda name: bool(name.writer))
    entries = entries_of(storage, parts)
    return [entry for entry in entries if entry["kind"] == kind]


def read_parts(
    storage: Storage, wanted: Callable[[PartName], bool] = lambda name: True
) -> list[Part]:
    """Read the parts whose name satisfies `wanted`, in order, without parsing their lines.

    Raises:
        UserError: a part is not a file or cannot be read.
    """
    names = [name for name in part_names(storage) if wanted(name)]
    if len(names) <= _READ_THREADS and storage.is_local:  # starting threads would take longer
        return [read_part(storage, name) for name in names]
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        return list(pool.map(partial(read_part, storage), names))


def entries_of(storage: Storage, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the entries of those parts that belong to the history, in order.

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
    """Return the steps that no later attempt rolled back, in the order in which they were done.

    In an intact history they are numbered 1, 2, 3...; in a damaged one, steps are missing or
    duplicated.
    """
    return _filter_surviving(entries, "step")


def surviving_evaluations(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluations of steps that no later attempt rolled back, in order."""
    return _filter_surviving(entries, "evaluated")


def _filter_surviving(entries: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Return the entries of a kind, each about a step, that no later attempt rolled back."""
    lineage, surviving, seen = Lineage(), list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for entry in entries:
        if entry["kind"] == kind:
            surviving.append(entry)
            seen.append(entry)
        elif event := lineage.event(entry):
            surviving = lineage.left(event, surviving, seen)
    return surviving


def effective_steps(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the steps that produced the current model, each once and without rolled-back ones."""
    steps = {entry["step"]: entry for entry in surviving_steps(entries)}
    # In a damaged history a step can occur twice: the dict keeps the later one.
    return [steps[step] for step in sorted(steps)]


def world_sizes(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the world size of every group of workers that became ready for a step, in order."""
    return [entry["world_size"] for entry in entries if entry["kind"] == "started"]


def restore_part(storage: Storage, name: str, data: bytes) -> bool:
    """Write a part whose own writer was killed before it could write it.

    If the part exists already, only the lines that it lacks are written, as the next part.

    Args:
        storage: the run's history folder.
        name: the first value of the writer's `unwritten`.
        data: the second value of the writer's `unwritten`.

    Returns:
        Whether anything was written.

    Raises:
        ValueError: `name` is not the name of a part.
    """
    part = PartName.parse(name)
    if part is None:
        raise ValueError(f"{name}: expected the name of a part, such as {PartName(1, '', 0)}")
    while data and storage.exists(str(part)):
        # The original writer may have got this far or further: keep its part, and write only the
        # lines after it to the next part.
        stored_lines = b"".join(read_part(storage, part).lines)
        data = data[len(stored_lines) :] if data.startswith(stored_lines) else b""
        part = part.next
    if data:
        storage.write(seal_part(part, data), str(part))
    return bool(data)


class HistoryWriter:
    """Writer of the history of one attempt, or of the driver's entries about it.

    Any thread may use it, and `add` never waits for storage. It never overwrites a part: it
    continues after the last existing part of the same attempt and writer.

    Args:
        storage: the run's history folder.
        attempt: from `next_attempt`.
        warn: called with one line if storage rejects a part; the part is written again later.
        writer: letter that distinguishes this writer's parts; empty for rank 0.
    """

    def __init__(
        self, storage: Storage, attempt: int, warn: Callable[[str], None], writer: str = ""
    ) -> None:
        self._warn = warn
        self._storage = storage
        self._lines: list[bytes] = []
        self._next = _first_free_name(storage, attempt, writer)
        self._written = time.monotonic()
        self._of_lines, self._of_storage = Lock(), Lock()

    def unwritten(self) -> tuple[str, bytes]:
        """Return the name of the next part and the lines that it will have."""
        with self._of_lines:
            return str(self._next), b"".join(self._lines)

    def add(self, kind: str, entry: Mapping[str, Any]) -> None:
        """Add an entry, to be written by the next `flush` or within some seconds."""
        now = {
            "time": round(time.time(), 3),
            "clock": monotonic_clock(),
            "monotonic": round(time.monotonic(), 6),
        }
        # The entry describes an earlier moment, to which the current clock does not apply.
        if "time" in entry:
            now = {}
        line = {"kind": kind, "attempt": self._next.attempt, **now, **entry}
        with self._of_lines:
            # Serialised here, so that later changes to the entry have no effect.
            self._lines.append(json.dumps(line).encode() + b"\n")
            is_time = time.monotonic() - self._written > PART_SECONDS
            if is_time:
                self._written = time.monotonic()
        if is_time:
            Thread(target=self.flush, name="elastrata-history", daemon=True).start()

    def flush(self) -> bool:
        """Write all entries added so far, and wait for storage.

        Returns:
            Whether every entry added before the call is on storage.
        """
        # `_of_storage` serialises writers; `_of_lines` is held briefly, so `add` never waits.
        with self._of_storage:
            with self._of_lines:
                lines, part = list(self._lines), self._next
                self._written = time.monotonic()
            if not lines:
                return True
            try:
                self._storage.write(seal_part(part, b"".join(lines)), str(part))
            # Storage backends raise errors of many types; none may end the training.
            except Exception as error:
                self._warn(
                    f"cannot write the history to {self._storage.url}, trying again: {error}"
                )
                return False
            with self._of_lines:
                # Lines added during the write stay for the next part.
                del self._lines[: len(lines)]
                self._next = part.next
            return True


@cache
def monotonic_clock() -> str:
    """Return an identifier of the clock that `time.monotonic` reads.

    Two processes with the same identifier share a clock: on Linux, all processes of a host until it
    reboots. If the system does not reveal its boot id, every process gets a different identifier.
    """
    boot_id, _ = host_identity()
    if boot_id is None:
        return uuid.uuid4().hex[:8]
    with suppress(OSError):  # a time namespace may shift the clock of a container
        boot_id += str(Path("/proc/self/ns/time").readlink())
    return sha256(boot_id.encode()).hexdigest()[:8]


def _first_free_name(storage: Storage, attempt: int, writer: str) -> PartName:
    """Return the name of the part after the last existing one of an attempt's writer."""
    part_numbers = [
        part.part
        for part in part_names(storage)
        if (part.attempt, part.writer) == (attempt, writer)
    ]
    return PartName(attempt, writer, max(part_numbers, default=-1) + 1)


def prepare_attempt(run: Storage, commit: Commit | None) -> int:
    """Complete the history before the next attempt continues it.

    Args:
        run: the run's folder.
        commit: the commit to continue from; None if it is another run's or there is no commit.

    Returns:
        The number of the new attempt, greater than every earlier one.
    """
    storage = run.sub("history")
    if commit:
        # The previous rank 0 may have died before it wrote the lines that travelled in the commit.
        restore_history(storage, commit)
    return max(next_attempt(storage), _last_saved(run.sub("checkpoints")) + 1)


def _last_saved(checkpoints: Storage) -> int:
    """Return the last attempt that saved a checkpoint; 0 without a checkpoint or folder."""
    try:
        # If the folder is gone, the run continues from memory, and its history knows the attempts.
        return max((folder.attempt for folder in list_folders(checkpoints)), default=0)
    except UserError:
        return 0


def unwritten_extra(writer: HistoryWriter) -> dict[str, Any]:
    """Return the lines not yet on storage, as part of a commit's `extra`."""
    part, lines = writer.unwritten()
    return {_PART: part, _LINES: lines.decode()}


def restore_history(storage: Storage, commit: Commit) -> None:
    """Write the history lines that travelled in a commit, unless they are on storage already.

    Args:
        storage: the run's history folder.
        commit: a commit of any tier.
    """
    part, lines = commit.extra.get(_PART), commit.extra.get(_LINES)
    if isinstance(part, str) and isinstance(lines, str) and PartName.parse(part):
        restore_part(storage, part, lines.encode())


def without_history(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a commit's `extra` without the history lines that travel in it."""
    return {key: value for key, value in extra.items() if key not in (_PART, _LINES, _HEAD)}


def unwritten_entries(commit: Commit) -> list[dict[str, Any]]:
    """Return the history entries that travel in a commit.

    Raises:
        UserError: an entry was altered.
    """
    lines = commit.extra.get(_LINES)
    where = f"checkpoint {commit.folder}"
    return [parse_entry(line.encode(), where) for line in str(lines or "").splitlines()]
