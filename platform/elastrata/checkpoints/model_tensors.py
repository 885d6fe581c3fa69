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


class ModelTensors(Mapping[str, Tensor]):
    """The plain tensors of a commit's model, by name. Each is read when it is asked for, into main
    memory, by this process alone, and is nobody's afterwards but the caller's.

    Args:
        storage: the run's folder of checkpoints.
        commit: one of its commits.
        part: of the state: the model, or another that has tensors of the model's names.

    Raises:
        UserError: the commit's metadata is missing or altered.
    """

    def __init__(self, storage: CommitStorage, commit: Commit, part: str = MODEL) -> None:
        self._storage, self._commit, self._part = storage, commit, part
        self._metadata = read_metadata(storage, commit)
        prefix = f"{part}."
        self._entries = {
            name.removeprefix(prefix): entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    @override
    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_alone(self._storage, self._commit, self._metadata, {self._part: {name: tensor}})
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
