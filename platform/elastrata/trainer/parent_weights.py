"""A parent's weights, read into a model that is sharded already."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from elastrata.checkpoints.commit import MARKER, Commit
from elastrata.checkpoints.training_state import model_sizes, restore, restore_weights
from elastrata.checkpoints.weights_folder import weights_folder
from elastrata.core.counterpart import HasCounterpart
from elastrata.core.first_weights import counted_rows, id_tables, sizes
from elastrata.core.sharding import local, own_box
from elastrata.core.workload import Workload
from elastrata.run.folder import Parent
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.storage import Storage


def begin_with(
    parent: Parent,
    workload: Workload,
    vocabulary: Vocabulary,
    seq_len: int,
    model: nn.Module,
    optimizer: Optimizer,
) -> None:
    """Reads what a parent has. Collective over all ranks.

    Args:
        parent: held against recipe and data before.
        workload: of the model.
        vocabulary: of its data.
        seq_len: of its data.
        model: with its first weights drawn, this rank's part of it.
        optimizer: of its parameters; without a state.

    Raises:
        UserError: the parent is not there any more, or not as it was, or has numbers that are NaN
            or infinite, of which training would say that its own steps made them.
    """
    if parent.kind != "run":
        _read_folder(parent, workload, vocabulary, seq_len, model)
        return
    checkpoints = Storage(parent.url).sub("checkpoints")
    commit = _commit(checkpoints, parent)
    if parent.optimizer:
        restore(checkpoints, commit, model, optimizer)
    else:
        given = model_sizes(checkpoints, commit)
        rows = counted_rows(workload, vocabulary, seq_len, given, parent.num_ids)
        restore_weights(checkpoints, commit, model, rows)
    _check_finite(model, checkpoints.uri(commit.folder))


@torch.no_grad()
def _read_folder(
    parent: Parent, workload: Workload, vocabulary: Vocabulary, seq_len: int, model: nn.Module
) -> None:
    """Every rank reads what its shards need, block by block."""
    assert isinstance(workload, HasCounterpart)
    weights = weights_folder(parent.url, parent.commit).weights
    table = workload.counterpart(vocabulary)
    ours = sizes(workload, vocabulary, seq_len)
    files = table.known_names(weights.tensors, ours)
    tables = id_tables(workload, vocabulary, seq_len)
    for name, parameter in model.named_parameters():
        origin, shard, (rows, *others) = table.origin(name), local(parameter), own_box(parameter)
        if name in tables:  # the rows of later ids stay as they were drawn
            rows = slice(min(rows.start, parent.num_ids), min(rows.stop, parent.num_ids))
            shard = shard[: rows.stop - rows.start]
        place = origin.box((rows, *others), parameter.shape[0])
        weights.copy(files[origin.name], place, shard.T if origin.transposed else shard)


@torch.no_grad()
def _check_finite(model: nn.Module, where: str) -> None:
    """Looks at this rank's part of every weight."""
    for name, parameter in model.named_parameters():
        shard = local(parameter)
        if shard.numel() and not all(end.isfinite() for end in torch.aminmax(shard)):
            raise UserError(f"{where}: {name}: has NaN or infinite numbers: expected finite ones")


def _commit(checkpoints: Storage, parent: Parent) -> Commit:
    assert parent.commit is not None
    where = f"checkpoint {checkpoints.uri(parent.commit)}"
    try:
        if checkpoints.sha256(parent.commit, MARKER) != parent.sha256:
            raise UserError(f"{where}: altered since the run began with it")
        return Commit.from_json(checkpoints.read(parent.commit, MARKER), parent.commit)
    except FileNotFoundError:
        raise UserError(f"{where}: not there any more, and the run has to begin with it") from None
