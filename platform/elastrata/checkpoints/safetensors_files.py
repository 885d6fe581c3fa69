"""Reader of safetensors files in pieces: each rank reads only what its shards need.

The safetensors library maps local files into memory and cannot read from object stores. So this
module reads the numbers itself, and the library only checks the headers, on a sparse file of the
same size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor

from elastrata_pipelines.checked_json import (
    describe_error,
    file_size,
    list_names,
    make_printable,
    parse_json,
    read_bytes,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

MOST_HEADER_BYTES = 100_000_000
"""Limit of the library."""
_METADATA = "__metadata__"
_MOST_SHOWN = 5
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types whose every value is exact in fp32."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
_BLOCK_BYTES = 64 * 2**20
"""Largest read of a tensor."""
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
    """The tensors in `model.safetensors`, or in the files of its index."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold tensors, sorted.

        Raises:
            UserError: there are no such files.
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
            UserError: a file is missing, truncated or not a safetensors file, or index and files
                disagree about a tensor; one line for each.
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
        """Copy a part of a tensor into another one, in blocks of rows.

        Args:
            name: the stored tensor's name.
            box: the part, as a range in each dimension.
            target: destination of the same shape, with any floating-point type, on any device.

        Raises:
            UserError: the file cannot be read or is truncated, or the rows hold NaN or infinite
                values.
        """
        # A rank may have no part of a small tensor.
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
        """Read whole rows of a tensor."""
        dtype, width = DTYPES[stored.dtype], prod(stored.shape[1:])
        data = bytearray((last - first) * width * dtype.itemsize)
        where = self.storage.uri(stored.file)
        try:
            with self.storage.open_scattered(stored.file) as stream:
                stream.seek(stored.begin + first * width * dtype.itemsize)
                num_read = stream.readinto(data)
        except Exception as error:  # each kind of store has its own
            raise UserError(f"{where}: cannot be read ({describe_error(error)})") from None
        if num_read != len(data):
            raise UserError(f"{where}: truncated while it was read")
        block = torch.frombuffer(data, dtype=dtype)
        # aminmax is one pass without a copy, cheap compared with the read, and propagates NaN.
        if odd := [end.item() for end in torch.aminmax(block) if not isfinite(end.item())]:
            raise UserError(
                f"{where}: {make_printable(name)}: contains {odd[0]:g}: expected finite numbers"
            )
        return block.reshape(last - first, *stored.shape[1:])

    def _disagreements(self, headers: Mapping[str, Mapping[str, StoredTensor]]) -> list[str]:
        """Return a line for each tensor that is missing from its file or the index, or is in
        another file."""
        problems = [
            f"{self.storage.uri(file)}: has no tensor {make_printable(name)}, which {INDEX} lists"
            for name, file in self._weight_map.items()
            if name not in headers[file]
        ]
        for file, header in headers.items():
            for name in header:
                said = self._weight_map.get(name)
                if said is None:
                    tail = f"which {INDEX} does not list"
                elif said != file:
                    tail = f"which {INDEX} lists in {make_printable(said)}"
                else:
                    continue
                problems.append(
                    f"{self.storage.uri(file)}: has a tensor {make_printable(name)}, {tail}"
                )
        # An index of another model may be wrong about thousands of tensors.
        more = len(problems) - _MOST_SHOWN
        rest = [f"{self.storage.uri(INDEX)}: and {more} more"] if more > 0 else []
        return [*problems[:_MOST_SHOWN], *rest]

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        """The file of each tensor, by the index."""
        where = self.storage.uri(INDEX)
        try:
            values = parse_json(read_bytes(self.storage, INDEX), where)
        except FileNotFoundError:  # a link that leads nowhere
            raise UserError(f"{where}: missing") from None
        found = values.get("weight_map") if isinstance(values, dict) else None
        is_map = isinstance(found, dict) and all(
            isinstance(file, str) and file.endswith(".safetensors") and "/" not in file
            for file in found.values()
        )
        if not is_map or not found:
            raise UserError(f"{where}: not an index of safetensors files (weight_map is missing)")
        return dict(found)

    def _header(self, file: str) -> dict[str, StoredTensor]:
        """Return the tensors of a file, by name."""
        where = self.storage.uri(file)
        try:
            size = file_size(self.storage, file)
        except FileNotFoundError:
            raise UserError(f"{where}: missing") from None
        with self.storage.open_scattered(file) as stream:
            # Format: the header's length in 8 bytes, little-endian, then the header in JSON, then
            # the numbers.
            prefix = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if size < _LENGTH_BYTES or length > min(MOST_HEADER_BYTES, size - _LENGTH_BYTES):
                raise UserError(f"{where}: truncated, or not a safetensors file ({size:,} bytes)")
            header = stream.read(length)
        _check_header(prefix + header, size, where)
        start, entries = _LENGTH_BYTES + length, parse_json(header, where)
        entries.pop(_METADATA, None)
        return {name: _stored(file, entry, start) for name, entry in entries.items()}


def _check_header(beginning: bytes, num_bytes: int, where: str) -> None:
    """Let the library check that the tensors fill the file without gaps or overlaps.

    Args:
        beginning: the file's first bytes, up to the end of the header.
        num_bytes: size of the file.
        where: name of the file in errors.
    """
    from safetensors import SafetensorError, safe_open

    with NamedTemporaryFile(prefix="elastrata-") as scratch:
        scratch.write(beginning)
        # Sparse, so a file of any size takes no space on disk.
        scratch.truncate(num_bytes)
        scratch.flush()
        try:
            with safe_open(scratch.name, framework="pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{where}: truncated or altered ({error})") from None


def _why_none(names: list[str]) -> str:
    """Return why a folder has no readable weights."""
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which may run code, or a file of another library: expected "
            f"{WEIGHTS}, as written by transformers' save_pretrained"
        )
    return f"has no weights: expected {WEIGHTS}, or {INDEX}"


def _stored(file: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    begin = start + entry["data_offsets"][0]
    return StoredTensor(file=file, dtype=entry["dtype"], shape=tuple(entry["shape"]), begin=begin)
