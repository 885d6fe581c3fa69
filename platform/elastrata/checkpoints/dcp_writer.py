"""Writer of PyTorch's Distributed Checkpoint (DCP) to a `CommitStorage`.

The files have the format of DCP's own file system writer, so its tools read them. Unlike there,
files are not renamed at the end (object stores cannot), and each is hashed.
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemBase,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from elastrata.checkpoints.commit import METADATA, CommitStorage, FileRecord


class HashingStream(io.RawIOBase):
    """Stream for writing that counts the bytes and optionally hashes them."""

    def __init__(self, raw: IO[bytes], *, hashed: bool) -> None:
        self._raw = raw
        self._digest = hashlib.sha256() if hashed else None
        self._size = 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        """Write all of `data`, an object with the buffer protocol; return its number of bytes."""
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
    """File system interface for DCP. Paths are relative to the root of the storage."""

    def __init__(self, storage: CommitStorage, *, hashed: bool = True) -> None:
        self._storage = storage
        self._hashed = hashed
        self.records: dict[str, FileRecord] = {}
        """The completely written files, by path."""

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
        """Do nothing: folders appear with their first file."""

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


RAW = "elastrata.raw"
"""Marks a tensor that is stored as its bytes alone."""


class CachingPlanner(DefaultSavePlanner):
    """Planner that plans the save of a state once and reuses the plan for the same names and
    shapes.

    Planning runs Python for every tensor, on every rank and again on rank 0, and takes CPU time
    from the training that runs meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        # DCP caches plans per process, by this key; a shared key would mix up the states of two
        # savers.
        self._cached_plans_key = uuid.uuid4().hex
        self._layout: list[tuple[Any, ...]] | None = None
        self._pickled: tuple[Metadata, Metadata, bytes] | None = None

    @override
    def create_local_plan(self) -> SavePlan:
        layout = [_layout(name, value) for name, value in self.state_dict.items()]
        known = SavePlanner._cached_save_plan.get(self._cached_plans_key)
        if known is not None and layout == self._layout:
            self.plan = known
            # DCP's sign for the coordinator to reuse the cached plan.
            return SavePlan([], usable=False)
        self._layout = layout
        return super().create_local_plan()

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, _ = super().create_global_plan(all_plans)
        # DCP sends the metadata to all ranks after the save. Only rank 0 needs it and has it as
        # `self.metadata`.
        return plans, Metadata({})

    def pickled_metadata(self, places: dict[MetadataIndex, _StorageInfo]) -> bytes:
        """Return the pickled metadata of the planned save, given the position of each item. On rank
        0, after the global plan."""
        # Pickled again only if the positions changed, since that is Python for every tensor, too.
        if self._pickled:
            planned, whole, data = self._pickled
            if planned is self.metadata and whole.storage_data == places:
                return data
        whole = dataclasses.replace(self.metadata, version=CURRENT_DCP_VERSION, storage_data=places)
        self._pickled = self.metadata, whole, pickle.dumps(whole)
        return self._pickled[2]

    def forget(self) -> None:
        """Free DCP's cached plans of this planner."""
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
        # Equal global shapes may be sharded differently, and the plan depends on the shards.
        return name, value.shape, value.dtype, value.to_local().shape, value.placements
    return (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name,)


@dataclasses.dataclass(frozen=True)
class HashedResult(WriteResult):
    """A rank's report to the coordinator about one tensor that it wrote."""

    file: FileRecord
    """The file that holds the tensor, among others."""


class CommitWriter(FileSystemWriter):
    """Writer of one checkpoint into a new folder.

    Args:
        storage: root of the folder.
        folder: name of the folder.
        planner: planner of this save.
        arrived: waits until the staged copy is in main memory.
        finished: called on the coordinator when all files are written, with a record of each.
    """

    _hashed = True

    def __init__(
        self,
        storage: CommitStorage,
        folder: str,
        planner: CachingPlanner,
        arrived: Callable[[], None],
        finished: Callable[[dict[str, FileRecord]], None],
    ) -> None:
        # DCP's own fsync falls back to syncing the whole machine if a stream has no descriptor. The
        # storage's create() syncs the one file where needed. The data is in main memory already:
        # copying ahead would wait for all queued work of the GPU.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self._storage = storage
        self._folder = folder
        self._planner = planner
        self._arrived = arrived
        self._finished = finished
        self._files = StorageFiles(storage, hashed=self._hashed)
        self.fs = cast(Any, self._files)
        self.path = folder

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._arrived()
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
        """Return None: a checkpoint may be moved, so it does not record its place."""
        return None


@dataclasses.dataclass(frozen=True)
class RawResult(HashedResult):
    """A rank's report to the coordinator about all that it wrote."""

    lengths: list[int]
    """Bytes of every item of the rank's plan, in the order of the file."""


class RawWriter(CommitWriter):
    """Writer of raw bytes without SHA-256, for in-memory checkpoints, which only the run itself
    reads.

    DCP makes an archive and a message for every tensor. That Python cost per tensor matters if a
    copy is made every few steps.
    """

    _hashed = False

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._arrived()
        written: Future[list[WriteResult]] = Future()
        written.set_result([self._write(plan, planner)] if plan.items else [])
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> RawResult:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        path, lengths = f"{self._folder}/{name}", []
        with self._files.create_stream(path, "wb") as stream:
            for item in plan.items:
                data = planner.resolve_data(item)
                raw = data.getbuffer() if isinstance(data, io.BytesIO) else raw_bytes(data)
                lengths.append(cast(HashingStream, stream).write(raw))
        # One result for all items: DCP's one per tensor has to be pickled, sent and merged.
        place = _StorageInfo(name, 0, sum(lengths))
        first = plan.items[0].index
        return RawResult(first, place.length, place, self._files.records[path], lengths)

    @override
    def _places(self, results: list[list[WriteResult]]) -> dict[MetadataIndex, _StorageInfo]:
        places = {}
        for plan, written in zip(self._planner.global_plan, results, strict=True):
            for result in cast("list[RawResult]", written):
                starts = accumulate(result.lengths, initial=0)
                for item, start, length in zip(plan.items, starts, result.lengths, strict=False):
                    name = result.storage_data.relative_path
                    places[item.index] = _StorageInfo(name, start, length, (RAW,))
        return places


def raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor as an array, without a copy if it is contiguous."""
    return cast("NDArray[np.uint8]", tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
