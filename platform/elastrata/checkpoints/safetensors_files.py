"""Safetensors files, read in pieces: a rank takes no more of them than its shards need.

Not through the library of that name, which maps local files into memory and knows no others. The
format: 8 bytes with the length of a header, the header as JSON, then the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from elastrata_pipelines.checked_json import (
    MOST_BYTES,
    Record,
    file_size,
    list_names,
    parse_json,
    parse_record,
    read_bytes,
    reason,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that every number of which is one of fp32, too."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
_BLOCK_BYTES = 64 * 2**20
"""A tensor is read by so much at a time."""
_LENGTH_BYTES = 8
_METADATA = "__metadata__"

Count = Annotated[int, Field(ge=0, lt=2**62)]


class _Entry(Record):
    dtype: str
    shape: list[Count]
    data_offsets: list[Count]


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
            UserError: a line for each file that is missing, truncated or none.
        """
        found, problems = dict[str, StoredTensor](), list[str]()
        for file in self.files:
            try:
                found |= self._header(file)
            except UserError as error:
                problems += error.problems
        if INDEX in list_names(self.storage) and self.files != (WEIGHTS,) and not problems:
            problems = [
                f"{self.storage.uri(file)}: has no tensor {name}, which {INDEX} says"
                for name, file in self._weight_map.items()
                if name not in found or found[name].file != file
            ]
        if problems:
            raise UserError(*problems)
        return found

    def copy(self, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        """Reads a part of a tensor into another one, some rows at a time.

        Args:
            name: the tensor's.
            box: the part: a range in each dim.
            target: of that shape; of any floating type, on any device.

        Raises:
            UserError: the file cannot be read, or ends before the tensor does.
        """
        if target.numel() == 0:
            return
        stored = self.tensors[name]
        if not stored.shape:
            target.copy_(self._rows(stored, 0, 1).reshape(()))
            return
        row_bytes = prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize
        rows, at_once = box[0], max(1, _BLOCK_BYTES // max(1, row_bytes))
        for first in range(rows.start, rows.stop, at_once):
            last = min(first + at_once, rows.stop)
            block = self._rows(stored, first, last)
            target[first - rows.start : last - rows.start].copy_(block[(slice(None), *box[1:])])

    def _rows(self, stored: StoredTensor, first: int, last: int) -> Tensor:
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
        return torch.frombuffer(data, dtype=dtype).reshape(last - first, *stored.shape[1:])

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        """The file of each tensor, as the index says."""
        where = self.storage.uri(INDEX)
        values = parse_json(read_bytes(self.storage, INDEX), where)
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
            if size < _LENGTH_BYTES or length > min(MOST_BYTES, size - _LENGTH_BYTES):
                raise UserError(f"{where}: truncated, or no safetensors file ({size:,} bytes)")
            header = parse_json(stream.read(length), where)
        start = _LENGTH_BYTES + length
        if not isinstance(header, dict):
            raise UserError(f"{where}: no safetensors file")
        entries = {name: value for name, value in header.items() if name != _METADATA}
        found = {name: _stored(file, name, value, start, where) for name, value in entries.items()}
        end = max(
            (start + int(value["data_offsets"][1]) for value in entries.values()), default=start
        )
        if size != end:
            kind = "truncated" if size < end else "altered"
            raise UserError(f"{where}: {kind} ({size:,} bytes, expected {end:,})")
        return found


def _why_none(names: list[str]) -> str:
    """Why a folder has no weights that can be read."""
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which may run code, or of another library: expected "
            f"{WEIGHTS}, as transformers' save_pretrained writes it"
        )
    return f"has no weights: expected {WEIGHTS}, or {INDEX}"


def _stored(file: str, name: str, value: Any, start: int, where: str) -> StoredTensor:
    entry = parse_record(_Entry, json.dumps(value), f"{where}: {name}")
    if len(entry.data_offsets) != 2:
        raise UserError(f"{where}: {name}: data_offsets: expected two")
    begin, end = entry.data_offsets
    dtype = DTYPES.get(entry.dtype)
    if dtype is not None and end - begin != prod(entry.shape) * dtype.itemsize:
        raise UserError(f"{where}: {name}: {end - begin:,} bytes are not its shape's (altered)")
    return StoredTensor(file=file, dtype=entry.dtype, shape=tuple(entry.shape), begin=start + begin)
