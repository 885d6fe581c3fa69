"""Checked JSON: reads the project's JSON files with limits on size and depth, and validates them.

Whatever is found in place of a file (a folder, a pipe, a circular link, JSON nested a million
levels deep, a list instead of a number) leads to a one-line error that names file and field.
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
"""Maximum size of a JSON file that is read whole."""
MOST_DEPTH = 64
"""Maximum nesting depth of objects and arrays."""
_SHOWN_PROBLEMS = 5
_SHOWN_CHARACTERS = 60
_LONGEST_REASON = 300
_REASONS = {
    errno.EISDIR: "a folder, expected a file",
    errno.ENOTDIR: "a part of its path is a file, expected a folder",
    errno.ELOOP: "a link that leads back to itself",
}


class UnreadableError(UserError):
    """An existing file cannot be read at present; a retry may succeed."""


class Record(BaseModel):
    """Base of the models stored as JSON: frozen, without unknown keys or type conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Kind = TypeVar("Kind", bound=BaseModel)


def read_bytes(storage: Storage, *parts: str, most: int = MOST_BYTES) -> bytes:
    """Return all bytes of a file.

    Args:
        storage: folder that contains the file.
        parts: path of the file below the folder.
        most: maximum size in bytes.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: it is not a regular file, or larger than `most`.
        UnreadableError: it cannot be read.
    """
    where = storage.uri(*parts)
    # The size is checked first, so that a huge file in the wrong place does not exhaust memory.
    if (size := file_size(storage, *parts)) > most:
        raise UserError(f"{where}: {size:,} bytes, expected at most {most:,} (altered)")
    try:
        return storage.read(*parts)
    except FileNotFoundError:
        raise
    # Every kind of store raises errors of other classes.
    except Exception as error:
        raise _unreadable(where, error) from None


def list_names(storage: Storage, *parts: str) -> list[str]:
    """Return the sorted names directly below a folder; empty if the folder does not exist.

    Raises:
        UserError: it is not a folder, or cannot be listed.
    """
    where = storage.uri(*parts)
    path = Path(storage.path(*parts))
    try:
        # Call stat() only once, as a folder may appear meanwhile. For a broken link, stat() raises
        # the reason.
        if storage.is_local and os.path.lexists(path) and not stat.S_ISDIR(path.stat().st_mode):
            raise UserError(f"{where}: a file, expected a folder")
        return storage.names(*parts)
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(where, error) from None


def file_size(storage: Storage, *parts: str) -> int:
    """Return the size of a file in bytes.

    Args:
        storage: folder that contains the file.
        parts: path of the file below the folder.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: it is not a regular file, or its status cannot be read.
    """
    where = storage.uri(*parts)
    try:
        if not storage.is_local:
            # fsspec caches listings, which may be out of date.
            storage.fs.invalidate_cache()
            return storage.size(*parts)
        status = Path(storage.path(*parts)).stat()
    except FileNotFoundError:
        raise
    # Every kind of store raises errors of other classes.
    except Exception as error:
        raise UserError(f"{where}: cannot be read ({describe_error(error)})") from None
    # Opening a pipe would wait forever.
    if not stat.S_ISREG(status.st_mode):
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "device, pipe or socket"
        raise UserError(f"{where}: a {kind}, expected a file")
    return status.st_size


def describe_error(error: Exception) -> str:
    """Return, in one line, why a file cannot be read."""
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno) or error.strerror or type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines and isinstance(error, TimeoutError):  # fsspec's, which has no text
        return "no answer in time"
    return make_printable(lines[0]) if lines else type(error).__name__


def make_printable(text: str) -> str:
    """Return a text as one line of limited length, with control characters escaped."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:_LONGEST_REASON])
    return line if len(text) <= _LONGEST_REASON else f"{line}..."


def parse_json(data: bytes | str, where: str) -> Any:
    """Parse JSON of limited depth.

    Args:
        data: the text; bytes are decoded as UTF-8.
        where: name of the text in errors: the file, with the line number if there are several
            lines.

    Raises:
        UserError: the text is not JSON, or nested deeper than `MOST_DEPTH`.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise UserError(f"{where}: nested deeper than {MOST_DEPTH} levels (altered)") from None
    # UnicodeDecodeError is a ValueError, too.
    except ValueError as error:
        raise UserError(f"{where}: not JSON (torn or altered): {describe_error(error)}") from None
    if _is_deeper(value, MOST_DEPTH):
        raise UserError(f"{where}: nested deeper than {MOST_DEPTH} levels (altered)")
    return value


def parse_record(kind: type[Kind], data: bytes | str, where: str, advice: str = "") -> Kind:
    """Parse a JSON text and validate it against a model.

    Args:
        kind: the model.
        data: the text.
        where: name of the text in errors.
        advice: what to do about errors; appended to each line.

    Raises:
        UserError: one line for each field that is missing, unknown, or of the wrong type or range.
    """
    if not isinstance(parse_json(data, where), dict):
        raise UserError(f"{where}: expected a JSON object{_tail(advice)}")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise UserError(*(f"{where}: {line}{_tail(advice)}" for line in _lines(error))) from None


def read_record(kind: type[Kind], storage: Storage, *parts: str, advice: str = "") -> Kind:
    """Read a file and parse it; raises what `read_bytes` and `parse_record` raise."""
    return parse_record(kind, read_bytes(storage, *parts), storage.uri(*parts), advice)


def _unreadable(where: str, error: Exception) -> UserError:
    """Return the error to raise for a file or folder that cannot be read."""
    # Only these errors are certain to stay; any other one is worth a retry.
    is_final = isinstance(error, OSError) and error.errno in (*_REASONS, errno.ENOENT)
    return (UserError if is_final else UnreadableError)(
        f"{where}: cannot be read ({describe_error(error)})"
    )


def _is_deeper(value: Any, depth: int) -> bool:
    # Breadth first, because recursion would reach Python's limit.
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
    """Return one line for each invalid field, up to a limit."""
    found = error.errors(include_url=False, include_context=False)
    lines = [_line(detail) for detail in found[:_SHOWN_PROBLEMS]]
    if more := found[_SHOWN_PROBLEMS:]:
        lines.append(f"and {len(more)} more problems")
    return lines


def _line(detail: Any) -> str:
    field = make_printable(".".join(map(str, detail["loc"]))) or "the whole"
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
