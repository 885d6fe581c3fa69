"""JSON Lines: the text in a line, or why there is none."""

from __future__ import annotations

import json
from typing import Any

from elastrata_pipelines.errors import UserError, in_one_line

NAMED_BY = "text_field, --text-field"
"""The key of the recipe that names the field, or column, with the text."""
_SHOWN_FIELDS, _SHOWN_CHARACTERS = 20, 60


def text_of_line(raw: bytes, field: str) -> str:
    """The text in one field of the JSON object that a line is.

    Raises:
        UserError: the line is no such object, or the field is missing, given twice or no text.
    """
    row = _parsed(raw)
    if not isinstance(row, dict):
        raise UserError(f"a JSON object was expected, not {type(row).__name__}")
    if field not in row:
        raise UserError(f"no field {field!r} ({NAMED_BY}); it has {_some_names(row)}")
    text = row[field]
    if not isinstance(text, str):
        raise UserError(f"field {field!r} is {type(text).__name__}, not text")
    if b"\\u" in raw and not encodes(text):
        raise UserError(f"field {field!r} holds half of a surrogate pair")
    if raw.count(f'"{field}"'.encode()) > 1 and _times_given(raw, field) > 1:
        raise UserError(f"field {field!r} is there twice")
    return text


def encodes(text: str) -> bool:
    """Whether a text can be written as UTF-8: no half of a surrogate pair is in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(raw: bytes) -> Any:
    try:
        # bytes would be taken for UTF-16 where they look like it, and hold halves of pairs
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 (byte {error.start} of the line)") from None
    except RecursionError:
        raise UserError("nested too deeply to be read") from None
    except ValueError as error:
        raise UserError(f"not valid JSON ({error})") from None


def _some_names(row: dict[str, Any]) -> str:
    names = [in_one_line(name[:_SHOWN_CHARACTERS]) for name in list(row)[:_SHOWN_FIELDS]]
    return ", ".join(names + ["..."] * (len(row) > _SHOWN_FIELDS)) or "none"


def _times_given(raw: bytes, field: str) -> int:
    """How often the outer object of a line has a field."""
    outer: list[tuple[str, Any]] = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=list)
    return [name for name, _ in outer].count(field)
