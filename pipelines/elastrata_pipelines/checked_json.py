"""The checked reader of JSON: every file of ours is bounded, parsed and held to its model here.

Whatever lies where a file of ours belongs (a folder, a pipe, a link in a circle, JSON nested a
million deep, a list where a number belongs) becomes one line that knows file and field.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

MOST_BYTES = 2**28
"""No file of ours that is read whole, as JSON, is larger."""
MOST_DEPTH = 64
"""No JSON of ours nests objects and arrays deeper."""
_SHOWN_PROBLEMS = 5
_SHOWN_CHARACTERS = 60
_LONGEST_REASON = 300
_REASONS = {
    errno.EISDIR: "a folder, expected a file",
    errno.ENOTDIR: "a part of its path is a file, expected a folder",
    errno.ELOOP: "a link that leads back to itself",
}


class UnreadableError(UserError):
    """A storage does not give what is there: maybe later it will."""


class Record(BaseModel):
    """A thing that is kept as JSON: frozen, no unknown keys, no value of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Kind = TypeVar("Kind", bound=BaseModel)


def read_bytes(storage: Storage, *parts: str, most: int = MOST_BYTES) -> bytes:
    """All bytes of a file of ours.

    Args:
        storage: the folder it lies in.
        parts: its path below.
        most: bytes that it may have.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is no regular file, or larger than `most`.
        UnreadableError: it cannot be read.
    """
    where = storage.uri(*parts)
    if (size := file_size(storage, *parts)) > most:
        raise UserError(f"{where}: {size:,} bytes, expected at most {most:,} (altered)")
    try:
        return storage.read(*parts)
    except FileNotFoundError:
        raise
    except Exception as error:  # each kind of store has its own
        raise _unreadable(where, error) from None


def list_names(storage: Storage, *parts: str) -> list[str]:
    """The names directly below a folder of ours, sorted; empty where there is none.

    Raises:
        UserError: it is no folder, or cannot be listed.
    """
    where = storage.uri(*parts)
    path = Path(storage.path(*parts))
    try:
        # One look decides: a folder may appear meanwhile. Of a link it says why it leads nowhere.
        if storage.is_local and os.path.lexists(path) and not stat.S_ISDIR(path.stat().st_mode):
            raise UserError(f"{where}: a file, expected a folder")
        return storage.names(*parts)
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(where, error) from None


def file_size(storage: Storage, *parts: str) -> int:
    """Bytes of a file of ours.

    Args:
        storage: the folder it lies in.
        parts: its path below.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is no regular file, or cannot be looked at.
    """
    where = storage.uri(*parts)
    try:
        if not storage.is_local:
            storage.fs.invalidate_cache()  # it may know of the folder what is no longer so
            return storage.size(*parts)
        status = Path(storage.path(*parts)).stat()
    except FileNotFoundError:
        raise
    except Exception as error:  # each kind of store has its own
        raise UserError(f"{where}: cannot be read ({reason(error)})") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "device, pipe or socket"
        raise UserError(f"{where}: a {kind}, expected a file")
    return status.st_size


def reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno) or error.strerror or type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0]) if lines else type(error).__name__


def printable(text: str) -> str:
    """A text in one line, and not too long a one: line ends and control characters are escaped."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:_LONGEST_REASON])
    return line if len(text) <= _LONGEST_REASON else f"{line}..."


def parse_json(data: bytes | str, where: str) -> Any:
    """The value of a JSON text whose depth is bounded.

    Args:
        data: the text, UTF-8 where it is bytes.
        where: what to call it in an error: the file, with the line where it has several.

    Raises:
        UserError: not JSON, or nested deeper than any of ours.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise UserError(f"{where}: nested deeper than {MOST_DEPTH} levels (altered)") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise UserError(f"{where}: not JSON (torn or altered): {reason(error)}") from None
    if _is_deeper(value, MOST_DEPTH):
        raise UserError(f"{where}: nested deeper than {MOST_DEPTH} levels (altered)")
    return value


def parse_record(kind: type[Kind], data: bytes | str, where: str, advice: str = "") -> Kind:
    """The record in a JSON text.

    Args:
        kind: the model that says what may be in it.
        data: the text.
        where: what to call it in an error.
        advice: what to do about it, for the end of each line.

    Raises:
        UserError: a line for each field that is missing, unknown, or of another type or range.
    """
    if not isinstance(parse_json(data, where), dict):
        raise UserError(f"{where}: expected a JSON object{_tail(advice)}")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise UserError(*(f"{where}: {line}{_tail(advice)}" for line in _lines(error))) from None


def read_record(kind: type[Kind], storage: Storage, *parts: str, advice: str = "") -> Kind:
    """The record in a file: `read_bytes`, then `parse_record`, with what they raise."""
    return parse_record(kind, read_bytes(storage, *parts), storage.uri(*parts), advice)


def _unreadable(where: str, error: Exception) -> UserError:
    """The error to raise for a file or folder that storage does not give."""
    is_final = isinstance(error, OSError) and error.errno in (*_REASONS, errno.ENOENT)
    return (UserError if is_final else UnreadableError)(
        f"{where}: cannot be read ({reason(error)})"
    )


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [item for node in level for item in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _lines(error: ValidationError) -> list[str]:
    """A line for each field at fault, the first few of them."""
    found = error.errors(include_url=False, include_context=False)
    lines = [_line(detail) for detail in found[:_SHOWN_PROBLEMS]]
    if more := found[_SHOWN_PROBLEMS:]:
        lines.append(f"and {len(more)} more problems")
    return lines


def _line(detail: Any) -> str:
    field = printable(".".join(map(str, detail["loc"]))) or "the whole"
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if detail["type"] in ("missing", "extra_forbidden"):
        return f"{field}: {'missing' if detail['type'] == 'missing' else 'unknown key'}"
    shown = repr(detail["input"])
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return f"{field}: {shown}: {message}"


def _tail(advice: str) -> str:
    return f"; {advice}" if advice else ""
