"""The header of a safetensors file, held to all that the format promises.

Its tensors lie one after the other: none overlaps another, and no byte belongs to none. What the
library of that name refuses is refused here, in a line that names the tensor; so are a name or an
entry that is given twice, of which the format allows one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from math import prod
from operator import mul
from typing import Annotated, Any

from pydantic import Field

from elastrata_pipelines.checked_json import Record, parse_json, parse_record, printable
from elastrata_pipelines.errors import UserError

MOST_HEADER_BYTES = 100_000_000
"""As the library has it."""
_METADATA = "__metadata__"
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Of a number, by the format's name of its type."""
_MOST_SHOWN = 5

Count = Annotated[int, Field(ge=0, lt=2**62)]


class HeaderEntry(Record):
    """What a header says of a tensor."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


def parse_header(data: bytes, num_bytes: int, where: str) -> dict[str, HeaderEntry]:
    """Return what a header says of each tensor.

    Args:
        data: the header's own bytes.
        num_bytes: of the file after it.
        where: what to call the file in an error.

    Raises:
        UserError: a line for each tensor of which it says what cannot be.
    """
    values = _parsed(data, where)
    metadata = values.pop(_METADATA, {})
    is_text = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_text:
        raise UserError(f"{where}: {_METADATA}: expected texts by name, as the format has it")
    entries: dict[str, HeaderEntry] = {}
    problems: list[str] = []
    for name, value in values.items():
        shown = f"{where}: {printable(name)}"
        try:
            entries[name] = _entry(value, shown)
        except UserError as error:
            problems += error.problems
    if not problems:
        problems = _gaps(entries, num_bytes, where)
    if problems:
        more = len(problems) - _MOST_SHOWN
        rest = [f"{where}: and {more} more"] if more > 0 else []
        raise UserError(*problems[:_MOST_SHOWN], *rest)
    return entries


def parse_once(data: bytes, where: str) -> Any:
    """Return the value of a JSON text of others in which nothing has two meanings.

    Args:
        data: the text.
        where: what to call the file in an error.

    Raises:
        UserError: it is no UTF-8, no JSON as the standard has it, or gives a name twice.
    """

    def unlike(constant: str) -> Any:
        raise UserError(f"{where}: {constant}: not JSON (altered)")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise UserError(f"{where}: {printable(name)}: given twice (altered)")
            found[name] = value
        return found

    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{where}: not JSON (torn or altered): no UTF-8") from None
    parse_json(text, where)
    value = json.loads(text, object_pairs_hook=once, parse_constant=unlike)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        shown = printable(error.object[max(0, error.start - 9) : error.end + 9])
        raise UserError(f"{where}: no text: {shown} (altered)") from None
    return value


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise UserError(f"{where}: no safetensors file: its header does not begin with {{")
    values = parse_once(data, where)
    assert isinstance(values, dict), where
    return values


def _entry(value: Any, shown: str) -> HeaderEntry:
    """What the header says of one tensor, with a type, a shape and bytes that fit one another."""
    entry = parse_record(HeaderEntry, json.dumps(value), shown)
    if entry.dtype not in _BITS:
        raise UserError(f"{shown}: dtype {printable(entry.dtype)!r}: the format has none (altered)")
    begin, end = entry.data_offsets
    if max(accumulate(entry.shape, mul, initial=1)) * _BITS[entry.dtype] >= 2**64:
        raise UserError(f"{shown}: shape {entry.shape}: larger than any file (altered)")
    if 8 * (end - begin) != prod(entry.shape) * _BITS[entry.dtype]:
        raise UserError(f"{shown}: {end - begin:,} bytes are not its shape's (altered)")
    return entry


def _gaps(entries: Mapping[str, HeaderEntry], num_bytes: int, where: str) -> list[str]:
    """A line for each tensor that does not begin where the one before it ends; else one where the
    file does not end with the last tensor."""
    problems, end = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, own_end = entry.data_offsets
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            problems.append(
                f"{where}: {printable(name)}: begins at byte {begin:,} of the data, expected "
                f"{end:,}: it {what} (altered)"
            )
        end = max(end, own_end)
    if not problems and end != num_bytes:
        kind = "truncated" if num_bytes < end else "altered"
        problems = [f"{where}: {kind} ({num_bytes:,} bytes of data, expected {end:,})"]
    return problems
