"""The model of a commit, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typing_extensions import override

from elastrata.checkpoints.commit import Commit
from elastrata.checkpoints.commit_storage import CommitStorage
from elastrata.checkpoints.dcp_reader import read_metadata
from elastrata.checkpoints.training_state import MODEL, read_alone

_PREFIX = f"{MODEL}."


class ModelTensors(Mapping[str, Tensor]):
    """The plain tensors of a commit's model, by name. Each is read when it is asked for, into main
    memory, by this process alone, and is nobody's afterwards but the caller's.

    Args:
        storage: the run's folder of checkpoints.
        commit: one of its commits.

    Raises:
        UserError: the commit's metadata is missing or altered.
    """

    def __init__(self, storage: CommitStorage, commit: Commit) -> None:
        self._storage, self._commit = storage, commit
        self._metadata = read_metadata(storage, commit)
        self._entries = {
            name.removeprefix(_PREFIX): entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }

    @override
    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_alone(self._storage, self._commit, self._metadata, {MODEL: {name: tensor}})
        return tensor

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @override
    def __len__(self) -> int:
        return len(self._entries)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._entries
