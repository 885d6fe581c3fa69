"""Reader of commits for DCP, which fills existing tensors and never runs code from a file."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from elastrata.checkpoints.commit import METADATA, Commit, CommitStorage
from elastrata.checkpoints.dcp_writer import RAW, StorageFiles, raw_bytes
from elastrata_pipelines.errors import UserError


class CommitReader(FileSystemReader):
    """Reader of one commit, given the metadata that `read_metadata` has returned."""

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
        # RAW items come from RawWriter: DCP expects an archive of torch.save for each tensor.
        if not all(place.transform_descriptors == (RAW,) for place in places.values()):
            return super().read_data(plan, planner)
        # One read per file: a request per tensor would cost more than its bytes.
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
        # The whole stored chunk, of which the item may be a part if the layout has changed.
        tensor = torch.empty(chunk.sizes, dtype=saved.properties.dtype)
        raw_bytes(tensor)[:] = np.frombuffer(data, np.uint8)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Load planner that reads values other than tensors as weights-only: plain data, never code."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


# DCP reads its metadata with pickle.load, which would run code from an altered file.
class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows the classes of DCP's metadata and no others."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        found: Any = _ALLOWED.get((module, name))
        if found is None and module == "torch":
            value = getattr(torch, name, None)
            found = value if isinstance(value, torch.dtype | torch.layout) else None
        if found is None:
            raise pickle.UnpicklingError(
                f"{METADATA} refers to {module}.{name}, which is not allowed"
            )
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
    """Return a commit's metadata: names, shapes, and the position of each tensor's bytes.

    Raises:
        UserError: the file is missing, differs from the marker's checksum, or names a class that
            metadata never contains.
    """
    where = storage.uri(commit.folder, METADATA)
    if METADATA not in commit.files:
        raise UserError(f"checkpoint {storage.uri(commit.folder)}: {METADATA} is missing in it")
    data = storage.read(commit.folder, METADATA)
    expected = commit.files[METADATA].sha256
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise UserError(f"{where}: altered: its SHA-256 differs from the one in the marker")
    try:
        return cast(Metadata, _MetadataUnpickler(io.BytesIO(data)).load())
    except Exception as error:  # a damaged pickle may raise any error
        raise UserError(f"{where}: not the metadata of a checkpoint ({error})") from None
