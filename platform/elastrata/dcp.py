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
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from elastrata.commit import Commit, FileRecord
from elastrata.commit_storage import CommitStorage

METADATA = ".metadata"


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
        finished: called on the coordinator when all files are there, with a record of each one.
        hashed: whether the records say the SHA-256.
    """

    def __init__(
        self,
        storage: CommitStorage,
        folder: str,
        finished: Callable[[dict[str, FileRecord]], None],
        *,
        hashed: bool = True,
    ) -> None:
        # DCP's own fsync falls back to syncing the whole machine where a stream has no descriptor;
        # The storage's create() syncs the one file, where that means something.
        super().__init__(folder, sync_files=False)
        self._storage = storage
        self._folder = folder
        self._finished = finished
        self._files = StorageFiles(storage, hashed=hashed)
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
        written = [cast(HashedResult, result) for of_rank in results for result in of_rank]
        metadata = dataclasses.replace(
            metadata,
            version=CURRENT_DCP_VERSION,
            storage_data={result.index: result.storage_data for result in written},
        )
        path = f"{self._folder}/{METADATA}"
        with self._files.create_stream(path, "wb") as stream:
            cast(HashingStream, stream).write(pickle.dumps(metadata))
        files = {result.storage_data.relative_path: result.file for result in written}
        self._finished({**files, METADATA: self._files.records[path]})

    @override
    def storage_meta(self) -> StorageMeta | None:
        """Nothing: a checkpoint may be moved, so it does not say where it lies."""
        return None


class CommitReader(FileSystemReader):
    """Reads one commit, by metadata that `read_metadata` has returned."""

    def __init__(self, storage: CommitStorage, commit: Commit, metadata: Metadata) -> None:
        super().__init__(commit.folder)
        self._metadata = metadata
        self.fs = cast(Any, StorageFiles(storage))
        self.path = commit.folder

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


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

    @override
    def create_local_plan(self) -> SavePlan:
        layout = [_layout(name, value) for name, value in self.state_dict.items()]
        known = SavePlanner._cached_save_plan.get(self._cached_plans_key)
        if known is not None and layout == self._layout:
            self.plan = known
            return SavePlan([], usable=False)
        self._layout = layout
        return super().create_local_plan()

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
