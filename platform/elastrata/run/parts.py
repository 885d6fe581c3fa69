"""The part of a history: a file of lines, sealed by a last line that links it to the part before.

The seal holds the SHA-256 of the part's own lines and of those of the part before it, of the same
writer: that is how a part which was altered, copied, lost or put there by hand is known. Histories
of earlier versions have no seals.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from pydantic import NonNegativeInt

from elastrata_pipelines.checked_json import (
    Record,
    list_names,
    parse_record,
    read_bytes,
    read_record,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

SEALED = "sealed"
"""Kind of the line that ends a part."""
_SEAL_START = b'{"kind": "sealed"'
_PART = re.compile(r"(?P<attempt>[0-9]{4,9})-(?P<writer>d?)(?P<part>[0-9]{8})\.jsonl")


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
        found = _PART.fullmatch(name)
        if not found:
            return None
        parsed = cls(int(found["attempt"]), found["writer"], int(found["part"]))
        return parsed if str(parsed) == name else None


class Link(Record):
    """A part as it was when another one went on after it. More lines may have come to it since,
    from a writer that was taken for dead."""

    part: str
    lines: NonNegativeInt
    sha256: str
    """The checksum of those lines."""


class Seal(Record):
    """The last line of a part."""

    kind: str = SEALED
    part: str
    """The name of the part itself."""
    before: Link | None
    """The part that it goes on after; None for the first of its writer."""
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
    def link(self) -> Link:
        """The link to it in the part after it."""
        return Link(part=str(self.name), lines=len(self.lines), sha256=digest(self.lines))

    @property
    def has_torn_seal(self) -> bool:
        """Whether a line looks like a seal and is none, or has lines after it."""
        return any(is_seal(line) for line in self.lines)

    def holds(self, link: Link) -> bool:
        """Whether it begins with the lines of a link."""
        head = self.lines[: link.lines]
        return len(head) == link.lines and digest(head) == link.sha256


def is_seal(line: bytes) -> bool:
    """Whether a line is a seal, whole or torn."""
    return line.startswith(_SEAL_START)


def digest(lines: Iterable[bytes]) -> str:
    """The SHA-256 of lines, as `sha256sum` prints it."""
    return hashlib.sha256(b"".join(lines)).hexdigest()


def sealed(name: PartName, lines: bytes, before: Link | None) -> tuple[bytes, Link]:
    """The bytes of a part, and what the part after it is to say of it.

    Args:
        name: of the part.
        lines: of it.
        before: what it goes on after.
    """
    link = Part(name, tuple(lines.splitlines(keepends=True)), None).link
    seal = Seal(part=link.part, before=before, lines=link.lines, sha256=link.sha256)
    return lines + json.dumps(seal.model_dump()).encode() + b"\n", link


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


def link_before(storage: Storage, name: PartName) -> Link | None:
    """The part that one of that name is to go on after: the last one before it of the same writer,
    but none that was put there by hand."""
    before = [part for part in part_names(storage) if part.writer == name.writer and part < name]
    if not before:
        return None
    newest = read_part(storage, before[-1])
    if newest.seal is None and read_head(storage, name.writer) is None:
        return newest.link  # of an earlier version
    for part in (read_part(storage, one) for one in reversed(before)):
        if part.seal and part.seal.part == str(part.name):
            return part.link
    return None


def read_head(storage: Storage, writer: str) -> Link | None:
    """A part that a writer is known to have written, the newest or one before it; None: nobody
    knows."""
    try:
        return read_record(Link, storage, _head(writer))
    except (FileNotFoundError, UserError):
        return None


def write_head(storage: Storage, writer: str, link: Link) -> None:
    """Notes that the part is there, so that its loss is noticed."""
    storage.write(link.model_dump_json().encode(), _head(writer))


def _head(writer: str) -> str:
    return f"{writer}head.json"
