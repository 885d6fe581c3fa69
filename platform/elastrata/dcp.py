"""PyTorch's Distributed Checkpoint (DCP) over a `CommitStorage`, hashing what it writes.

The files are those of DCP's own file system writer, so its tools read them. What differs: no file
is renamed at the end (object stores cannot), and reading unpickles nothing but what a checkpoint's
metadata and tensors are made of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from elastrata.commit import Commit, FileRecord
from elastrata.commit_storage import CommitStorage

METADATA = ".metadata"
_RAW = "elastrata.raw"
"""Marks a tensor that is stored as its bytes alone."""


class HashingStream(io.RawIOBase):
    """A stream for writing that counts what goes through it and, if asked to, hashes it."""

    def __init__(self, raw: IO[bytes], *, hashed: bool) -> None:
        self._raw = raw
        self._digest = hashlib.sha256() if hashed else None
        self._size = 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        """Writes all of `data`, an object with the buffer protocol; returns its bytes."""
        view = memoryview(data).cast("B")
        self._raw.write(view)
        if self._digest:
            self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    @override
    def tell(self) -> int:
        return self._size

    @property
    def record(self) -> FileRecord:
        """Size of all that was written, and its SHA-256 if it was hashed."""
        return FileRecord(
            size=self._size, sha256=self._digest.hexdigest() if self._digest else None
        )


class StorageFiles(FileSystemBase):
    """What DCP needs of a file system. Paths are relative to the root of the storage."""

    def __init__(self, storage: CommitStorage, *, hashed: bool = True) -> None:
        self._storage = storage
        self._hashed = hashed
        self.records: dict[str, FileRecord] = {}
        """What was written completely, by path."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path = os.fspath(path)
        if mode == "rb":
            with self._storage.open(path) as stream:
                yield stream
            return
        with self._storage.create(path) as raw:
            hashing = HashingStream(raw, hashed=self._hashed)
            yield hashing
        self.records[path] = hashing.record

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    @override
    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    @override
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Folders appear with their first file."""

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._storage.exists(os.fspath(path))

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("object stores cannot rename")

    @override
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._storage.delete(os.fspath(path))

    @override
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class HashedResult(WriteResult):
    """What a rank tells the coordinator of one tensor that it wrote."""

    file: FileRecord
    """The file that the tensor lies in, with others."""


class CommitWriter(FileSystemWriter):
    """Writes one checkpoint into a folder of its own.

    Args:
        storage: what the folder lies in.
        folder: its name.
        planner: which plans this save.
        finished: called on the coordinator when all files are there, with a record of each one.
    """

    _hashed = True

    def __init__(
        self,
        storage: CommitStorage,
        folder: str,
        planner: RememberingPlanner,
        finished: Callable[[dict[str, FileRecord]], None],
    ) -> None:
        # DCP's own fsync falls back to syncing the whole machine where a stream has no descriptor;
        # The storage's create() syncs the one file, where that means something.
        super().__init__(folder, sync_files=False)
        self._storage = storage
        self._folder = folder
        self._planner = planner
        self._finished = finished
        self._files = StorageFiles(storage, hashed=self._hashed)
        self.fs = cast(Any, self._files)
        self.path = folder

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        hashed: Future[list[WriteResult]] = Future()
        results = super().write_data(plan, planner).wait() if plan.items else []
        hashed.set_result([self._with_file(result) for result in results])
        return hashed

    def _with_file(self, result: WriteResult) -> WriteResult:
        record = self._files.records[f"{self._folder}/{result.storage_data.relative_path}"]
        return HashedResult(result.index, result.size_in_bytes, result.storage_data, record)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        path = f"{self._folder}/{METADATA}"
        with self._files.create_stream(path, "wb") as stream:
            pickled = self._planner.pickled_metadata(self._places(results))
            cast(HashingStream, stream).write(pickled)
        written = [cast(HashedResult, result) for of_rank in results for result in of_rank]
        files = {result.storage_data.relative_path: result.file for result in written}
        self._finished({**files, METADATA: self._files.records[path]})

    def _places(self, results: list[list[WriteResult]]) -> dict[MetadataIndex, _StorageInfo]:
        return {result.index: result.storage_data for of_rank in results for result in of_rank}

    @override
    def storage_meta(self) -> StorageMeta | None:
        """Nothing: a checkpoint may be moved, so it does not say where it lies."""
        return None


@dataclasses.dataclass(frozen=True)
class LeanResult(HashedResult):
    """What a rank tells the coordinator of all that it wrote."""

    lengths: list[int]
    """Bytes of every item of its plan; they lie one after the other."""


class LeanWriter(CommitWriter):
    """Writes for a storage that others than a run need not read: tensors as raw bytes, no SHA-256.

    DCP makes an archive of every tensor and a message about it: a price per tensor, in Python, that
    a copy every few steps feels.
    """

    _hashed = False

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        written.set_result([self._write(plan, planner)] if plan.items else [])
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> LeanResult:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        path, lengths = f"{self._folder}/{name}", []
        with self._files.create_stream(path, "wb") as stream:
            for item in plan.items:
                data = planner.resolve_data(item)
                raw = data.getbuffer() if isinstance(data, io.BytesIO) else _raw_bytes(data)
                lengths.append(cast(HashingStream, stream).write(raw))
        place = _StorageInfo(name, 0, sum(lengths))
        first = plan.items[0].index
        return LeanResult(first, place.length, place, self._files.records[path], lengths)

    @override
    def _places(self, results: list[list[WriteResult]]) -> dict[MetadataIndex, _StorageInfo]:
        places = {}
        for plan, written in zip(self._planner.global_plan, results, strict=True):
            for result in cast("list[LeanResult]", written):
                starts = accumulate(result.lengths, initial=0)
                for item, start, length in zip(plan.items, starts, result.lengths, strict=False):
                    name = result.storage_data.relative_path
                    places[item.index] = _StorageInfo(name, start, length, (_RAW,))
        return places


class CommitReader(FileSystemReader):
    """Reads one commit, by metadata that `read_metadata` has returned."""

    def __init__(self, storage: CommitStorage, commit: Commit, metadata: Metadata) -> None:
        super().__init__(commit.folder)
        self._storage = storage
        self._folder = commit.folder
        self._metadata = metadata
        self.fs = cast(Any, StorageFiles(storage))
        self.path = commit.folder

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = {id(item): self.storage_data[item.storage_index] for item in plan.items}
        if not all(place.transform_descriptors == (_RAW,) for place in places.values()):
            return super().read_data(plan, planner)
        for name in sorted({place.relative_path for place in places.values()}):
            data = memoryview(self._storage.read(self._folder, name))
            for item in plan.items:
                place = places[id(item)]
                if place.relative_path == name:
                    self._load(item, data[place.offset : place.offset + place.length], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(data))
            return
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(saved, dcp_metadata.TensorStorageMetadata)
        chunk = next(one for one in saved.chunks if one.offsets == item.storage_index.offset)
        tensor = torch.empty(chunk.sizes, dtype=saved.properties.dtype)
        _raw_bytes(tensor)[:] = np.frombuffer(data, np.uint8)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor, in place where it is contiguous."""
    return cast("NDArray[np.uint8]", tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class RememberingPlanner(DefaultSavePlanner):
    """Plans the save of a state once; later ones of the same names and shapes follow that plan.

    Planning is Python for every tensor, on every rank and again on rank 0, at the expense of the
    training that runs meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        # DCP remembers for the whole process, by this key.
        self._cached_plans_key = uuid.uuid4().hex
        self._layout: list[tuple[Any, ...]] | None = None
        self._pickled: tuple[Metadata, Metadata, bytes] | None = None

    @override
    def create_local_plan(self) -> SavePlan:
        layout = [_layout(name, value) for name, value in self.state_dict.items()]
        known = SavePlanner._cached_save_plan.get(self._cached_plans_key)
        if known is not None and layout == self._layout:
            self.plan = known
            return SavePlan([], usable=False)
        self._layout = layout
        return super().create_local_plan()

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, _ = super().create_global_plan(all_plans)
        # DCP sends the metadata to all ranks after the save; rank 0 alone needs it: `metadata`.
        return plans, Metadata({})

    def pickled_metadata(self, places: dict[MetadataIndex, _StorageInfo]) -> bytes:
        """What the planned save holds, and where; on rank 0, after the global plan."""
        if self._pickled:
            planned, whole, data = self._pickled
            if planned is self.metadata and whole.storage_data == places:
                return data
        whole = dataclasses.replace(self.metadata, version=CURRENT_DCP_VERSION, storage_data=places)
        self._pickled = self.metadata, whole, pickle.dumps(whole)
        return self._pickled[2]

    def forget(self) -> None:
        """Frees what DCP remembers for this planner."""
        for remembered in (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_final_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
        ):
            remembered.pop(self._cached_plans_key, None)


def _layout(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.to_local().shape, value.placements
    return (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name,)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Reads values other than tensors as weights-only: plain Python data, never code."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that DCP's metadata consists of, and no others."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        found: Any = _ALLOWED.get((module, name))
        if found is None and module == "torch":
            value = getattr(torch, name, None)
            found = value if isinstance(value, torch.dtype | torch.layout) else None
        if found is None:
            raise pickle.UnpicklingError(f"{METADATA} asks for {module}.{name}, not allowed there")
        return found


_ALLOWED = {
    (allowed.__module__, allowed.__qualname__): allowed
    for allowed in (
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.TensorProperties,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}


def read_metadata(storage: CommitStorage, commit: Commit) -> Metadata:
    """What a commit holds: names, shapes, and where the bytes lie.

    Raises:
        RuntimeError: the file is not the one that the marker says.
        pickle.UnpicklingError: it asks for something that no metadata consists of.
    """
    data = storage.read(commit.folder, METADATA)
    expected = commit.files[METADATA].sha256
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise RuntimeError(f"{storage.uri(commit.folder, METADATA)} is altered")
    return cast(Metadata, _MetadataUnpickler(io.BytesIO(data)).load())
