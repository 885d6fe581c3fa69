"""The metadata of a checkpoint in DCP's format, read without running code from it."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from elastrata.checkpoints.commit import Commit
from elastrata.checkpoints.commit_storage import CommitStorage

METADATA = ".metadata"


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
