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

from elastrata.checkpoints.commit import METADATA, Commit
from elastrata.checkpoints.commit_storage import CommitStorage
from elastrata_pipelines.errors import UserError


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
        UserError: there is no such file, it is not the one that the marker says, or it asks for
            something that no metadata consists of.
    """
    where = storage.uri(commit.folder, METADATA)
    if METADATA not in commit.files:
        raise UserError(f"checkpoint {storage.uri(commit.folder)}: {METADATA} is missing in it")
    data = storage.read(commit.folder, METADATA)
    expected = commit.files[METADATA].sha256
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise UserError(f"{where}: altered: its SHA-256 is not that of the marker")
    try:
        return cast(Metadata, _MetadataUnpickler(io.BytesIO(data)).load())
    except Exception as error:  # a pickle that is none raises what it likes
        raise UserError(f"{where}: no metadata of a checkpoint ({error})") from None
