"""The state of a training run: taken from model and optimizers, and restored at any world size.

It consists of tensors: parameters, buffers, and the optimizers' state by parameter name. Optimizer
settings (learning rate, betas...) belong to the recipe and are not part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer
from typing_extensions import override

from elastrata.checkpoints.commit import Commit, CommitStorage
from elastrata.checkpoints.dcp_reader import CommitReader, SafeLoadPlanner, read_metadata
from elastrata.parallel.sharding import local, local_box
from elastrata_pipelines.errors import UserError

MODEL = "model"
OPTIMIZER = "optimizer"
_STATE = "state."


def training_state(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Return the live tensors of a model and its optimizers.

    The keys are `model` and `optimizer`, with tensors by name below them.

    Sharded parameters are DTensors. Nothing is copied: writing into these tensors changes the
    model. Optimizers that have not made a step have no state, and get none here.
    """
    state: dict[str, Any] = {MODEL: _tensors(get_model_state_dict(model))}
    if any(optimizer.state for optimizer in optimizers):
        state[OPTIMIZER] = _optimizer_state(model, optimizers)
    return state


def restore(
    storage: CommitStorage, commit: Commit, model: nn.Module, *optimizers: Optimizer
) -> None:
    """Restore a model and its optimizers from a commit, at any world size and in any layout.

    Collective over all ranks, if torch.distributed is initialised. Gradients are dropped.

    Raises:
        UserError: the commit holds another model or another optimizer.
    """
    metadata = read_metadata(storage, commit)
    saved = set(metadata.state_dict_metadata)
    state: dict[str, Any] = {MODEL: _tensors(get_model_state_dict(model))}
    if optimizers and any(name.startswith(f"{OPTIMIZER}.") for name in saved):
        for optimizer in optimizers:
            # torch creates the state of a fresh optimizer by a step with zero gradients, but not if
            # gradients exist already.
            optimizer.zero_grad(set_to_none=True)
        created = _optimizer_state(model, optimizers)
        state[OPTIMIZER] = _forget_unsaved(optimizers, created, saved)
    _load(storage, commit, metadata, state)


def load(storage: CommitStorage, commit: Commit, state: dict[str, Any]) -> None:
    """Read a commit into the tensors of `state`; every rank reads only what its shards need.

    Collective over all ranks, if torch.distributed is initialised. Other entries of the commit are
    ignored.

    Raises:
        UserError: a tensor is missing from the commit, or has another shape there.
        RuntimeError: reading failed.
    """
    _load(storage, commit, read_metadata(storage, commit), state)


@torch.no_grad()
def restore_weights(
    storage: CommitStorage, commit: Commit, model: nn.Module, rows: Mapping[str, int]
) -> None:
    """Restore a commit's model into one that may have tables with another number of rows.

    Collective over all ranks, if torch.distributed is initialised. The tables in `rows` are read
    whole by every rank that has a part of them; of other tensors, each rank reads its part.

    Args:
        storage: the folder of checkpoints.
        commit: one of them.
        model: with allocated parameters, in any layout.
        rows: number of rows to take, for each parameter that is such a table.

    Raises:
        UserError: the commit holds another model.
    """
    metadata = read_metadata(storage, commit)
    state = _tensors(get_model_state_dict(model))
    whole = {name: tensor for name, tensor in state.items() if name not in rows}
    _load(storage, commit, metadata, {MODEL: whole})
    for name in sorted(rows.keys() & state.keys()):
        entry = metadata.state_dict_metadata[f"{MODEL}.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        table = torch.empty(entry.size, dtype=entry.properties.dtype)
        # Without collectives: with a pipeline, only some ranks have this table.
        _read(storage, commit, metadata, {MODEL: {name: table}}, alone=True)
        target, box = local(state[name]), local_box(state[name])
        part = table[: rows[name]][box]
        target[: len(part)].copy_(part)


def part_is_saved(storage: CommitStorage, commit: Commit, part: str) -> bool:
    """Return whether a commit has tensors of that part of the state."""
    return bool(_entries(read_metadata(storage, commit), part))


def model_sizes(storage: CommitStorage, commit: Commit) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model in a commit."""
    entries = _entries(read_metadata(storage, commit), MODEL)
    return {name: tuple(entry.size) for name, entry in entries.items()}


def _entries(metadata: Metadata, part: str) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of the tensors of a part of the state, by name."""
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


@torch.no_grad()
def load_unsharded(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load unsharded tensors into a model that is not divided over ranks."""
    for name, tensor in _tensors(get_model_state_dict(model)).items():
        local(tensor).copy_(state[name])


def _load(
    storage: CommitStorage, commit: Commit, metadata: Metadata, state: dict[str, Any]
) -> None:
    _check(storage, commit, metadata, state)
    _read(storage, commit, metadata, state, alone=not dist.is_initialized())


def _optimizer_state(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizers, options=options)
    return {name: value for name, value in flat.items() if name.startswith(_STATE)}


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _forget_unsaved(
    optimizers: tuple[Optimizer, ...], state: dict[str, Any], saved: set[str]
) -> dict[str, Any]:
    """Drop the state of parameters that had none in the commit, because they had no gradient yet.

    Returns:
        The rest of `state`.
    """
    parameters = {name.rpartition(".")[0] for name in saved}
    kept = {
        name: value
        for name, value in state.items()
        if f"{OPTIMIZER}.{name.rpartition('.')[0]}" in parameters
    }
    live = {id(value) for value in kept.values()}
    for optimizer in optimizers:
        for parameter, values in list(optimizer.state.items()):
            if not any(id(value) in live for value in values.values()):
                del optimizer.state[parameter]
    return kept


def _check(
    storage: CommitStorage, commit: Commit, metadata: Metadata, state: dict[str, Any]
) -> None:
    problems = []
    for name, value in _flat(state, ""):
        entry = metadata.state_dict_metadata.get(name)
        if entry is None:
            problems.append(f"has no '{name}'")
        elif isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            problems.append(f"'{name}' has shape {tuple(entry.size)}, not {tuple(value.shape)}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"checkpoint {storage.uri(commit.folder)}: {problems[0]}{more}: it was saved with "
            "another model or optimizer"
        )


def _flat(state: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(
    storage: CommitStorage,
    commit: Commit,
    metadata: Metadata,
    state: dict[str, Any],
    *,
    alone: bool,
) -> None:
    try:
        with _without_no_dist_warning():
            dcp_load(
                state,
                storage_reader=CommitReader(storage, commit, metadata),
                planner=SafeLoadPlanner(),
                no_dist=alone,
            )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(
            f"checkpoint {storage.uri(commit.folder)}: rank {rank}: {cause}"
        ) from error


@contextmanager
def _without_no_dist_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")
        yield


class ModelTensors(Mapping[str, Tensor]):
    """The tensors of a commit's model, by name, unsharded. Each access reads the tensor into new
    main memory, in this process alone.

    Raises:
        UserError: the commit's metadata is missing or altered.
    """

    def __init__(self, storage: CommitStorage, commit: Commit, part: str = MODEL) -> None:
        self._storage, self._commit, self._part = storage, commit, part
        self._metadata = read_metadata(storage, commit)
        self._entries = _entries(self._metadata, part)

    @override
    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        state = {self._part: {name: tensor}}
        _read(self._storage, self._commit, self._metadata, state, alone=True)
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
