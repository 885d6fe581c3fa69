"""Safetensors files, read in pieces: a rank takes no more of them than its shards need.

Not through the library of that name, which maps local files into memory and knows no others. The
format: 8 bytes with the length of a header, the header as JSON, then the tensors' bytes. A header
is held to all that the format promises: no tensor overlaps another, no byte belongs to none, and no
name or entry is given twice. What is not so is refused in a line that names the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isfinite, prod
from operator import mul
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from elastrata_pipelines.checked_json import (
    Record,
    file_size,
    list_names,
    parse_json,
    parse_record,
    printable,
    read_bytes,
    reason,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

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


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that every number of which is one of fp32, too."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
_BLOCK_BYTES = 64 * 2**20
"""A tensor is read by so much at a time."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""


class SafetensorsFolder:
    """The tensors in `model.safetensors`, or in the files that its index names.

    Args:
        storage: the folder.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The names of the files that hold tensors, sorted.

        Raises:
            UserError: there are none.
        """
        names = list_names(self.storage)
        if WEIGHTS in names:
            return (WEIGHTS,)
        if INDEX in names:
            return tuple(sorted(set(self._weight_map.values())))
        raise UserError(f"{self.storage.uri()}: {_why_none(names)}")

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, by name.

        Raises:
            UserError: a line for each file that is missing, truncated or none, and for each tensor
                of which index and files disagree.
        """
        headers, problems = dict[str, Mapping[str, StoredTensor]](), list[str]()
        for file in self.files:
            try:
                headers[file] = self._header(file)
            except UserError as error:
                problems += error.problems
        if not problems and self.files != (WEIGHTS,):
            problems = self._disagreements(headers)
        if problems:
            raise UserError(*problems)
        return {name: stored for header in headers.values() for name, stored in header.items()}

    def copy(self, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        """Reads a part of a tensor into another one, some rows at a time.

        Args:
            name: the tensor's.
            box: the part: a range in each dim.
            target: of that shape; of any floating type, on any device.

        Raises:
            UserError: the file cannot be read, ends before the tensor does, or has a number there
                that is none, or is infinite: no training could begin with it.
        """
        if target.numel() == 0:
            return
        stored = self.tensors[name]
        if not stored.shape:
            target.copy_(self._rows(name, stored, 0, 1).reshape(()))
            return
        row_bytes = prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize
        rows, at_once = box[0], max(1, _BLOCK_BYTES // max(1, row_bytes))
        for first in range(rows.start, rows.stop, at_once):
            last = min(first + at_once, rows.stop)
            block = self._rows(name, stored, first, last)
            target[first - rows.start : last - rows.start].copy_(block[(slice(None), *box[1:])])

    def _rows(self, name: str, stored: StoredTensor, first: int, last: int) -> Tensor:
        """Some rows of a tensor, whole."""
        dtype, width = DTYPES[stored.dtype], prod(stored.shape[1:])
        data = bytearray((last - first) * width * dtype.itemsize)
        where = self.storage.uri(stored.file)
        try:
            with self.storage.open_scattered(stored.file) as stream:
                stream.seek(stored.begin + first * width * dtype.itemsize)
                num_read = stream.readinto(data)
        except Exception as error:  # each kind of store has its own
            raise UserError(f"{where}: cannot be read ({reason(error)})") from None
        if num_read != len(data):
            raise UserError(f"{where}: truncated while it was read")
        block = torch.frombuffer(data, dtype=dtype)
        # One pass and no copy, which is little beside the reading; NaN passes through both.
        if odd := [end.item() for end in torch.aminmax(block) if not isfinite(end.item())]:
            raise UserError(
                f"{where}: {printable(name)}: has numbers that are {odd[0]:g}: expected finite ones"
            )
        return block.reshape(last - first, *stored.shape[1:])

    def _disagreements(self, headers: Mapping[str, Mapping[str, StoredTensor]]) -> list[str]:
        """A line for each tensor that the index knows in no file, in another one, or in two."""
        problems = [
            f"{self.storage.uri(file)}: has no tensor {printable(name)}, which {INDEX} says"
            for name, file in self._weight_map.items()
            if name not in headers[file]
        ]
        for file, header in headers.items():
            for name in header:
                said = self._weight_map.get(name)
                if said is None:
                    tail = f"which {INDEX} knows nothing of"
                elif said != file:
                    tail = f"which {INDEX} has in {printable(said)}"
                else:
                    continue
                problems.append(f"{self.storage.uri(file)}: has a tensor {printable(name)}, {tail}")
        more = len(problems) - _MOST_SHOWN
        rest = [f"{self.storage.uri(INDEX)}: and {more} more"] if more > 0 else []
        return [*problems[:_MOST_SHOWN], *rest]

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        """The file of each tensor, as the index says."""
        where = self.storage.uri(INDEX)
        try:
            values = parse_once(read_bytes(self.storage, INDEX), where)
        except FileNotFoundError:  # a link that leads nowhere
            raise UserError(f"{where}: missing") from None
        found = values.get("weight_map") if isinstance(values, dict) else None
        is_map = isinstance(found, dict) and all(
            isinstance(file, str) and file.endswith(".safetensors") and "/" not in file
            for file in found.values()
        )
        if not is_map or not found:
            raise UserError(f"{where}: no index of safetensors files (weight_map)")
        return dict(found)

    def _header(self, file: str) -> dict[str, StoredTensor]:
        """The tensors that a file says it has, and has room for."""
        where = self.storage.uri(file)
        try:
            size = file_size(self.storage, file)
        except FileNotFoundError:
            raise UserError(f"{where}: missing") from None
        with self.storage.open_scattered(file) as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(MOST_HEADER_BYTES, size - _LENGTH_BYTES):
                raise UserError(f"{where}: truncated, or no safetensors file ({size:,} bytes)")
            header = stream.read(length)
        start = _LENGTH_BYTES + length
        entries = parse_header(header, size - start, where)
        return {name: _stored(file, entry, start) for name, entry in entries.items()}


def _why_none(names: list[str]) -> str:
    """Why a folder has no weights that can be read."""
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which may run code, or of another library: expected "
            f"{WEIGHTS}, as transformers' save_pretrained writes it"
        )
    return f"has no weights: expected {WEIGHTS}, or {INDEX}"


def _stored(file: str, entry: HeaderEntry, start: int) -> StoredTensor:
    begin = start + entry.data_offsets[0]
    return StoredTensor(file=file, dtype=entry.dtype, shape=tuple(entry.shape), begin=begin)
