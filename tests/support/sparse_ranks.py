"""Trains with weights held at zero, for the tests of sparsity: on some ranks, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import load, restore, training_state
from elastrata.device.kernels import use_kernels
from elastrata.parallel.sharding import local
from elastrata.recipe.recipe import Recipe
from elastrata.sparsity import rigl
from elastrata.sparsity.layers import sparse_matrices
from elastrata.sparsity.rigl import smallest
from elastrata.step.clip import Clip
from elastrata.step.records import StepRecord
from elastrata_pipelines.batches import Start
from elastrata_pipelines.storage import Storage
from support.bare_loop import BareTraining

Section = dict[str, Any]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sparse:
    """What a run did."""

    records: list[StepRecord]
    zeros: Arrays
    """Where the whole matrices are exactly zero in the end."""
    masks: list[Arrays]
    """Whole masks, each time they have changed."""


class _WatchedClip:
    """Looks at what clipping sees, between the backward pass and the update: zeros where weights
    are held at zero, and where they have just been freed."""

    def __init__(self, training: BareTraining, clip: Clip) -> None:
        self._training, self._clip = training, clip
        self._before: dict[str, Tensor] = {}

    def before_backward(self, share: float) -> None:
        self._clip.before_backward(share)

    def after_backward(self) -> Tensor:
        assert self._training.masks is not None
        held = self._training.masks.shards
        for name in held.keys() | self._before.keys():
            gradient = self._training.model.get_parameter(name).grad
            assert gradient is not None
            none = torch.zeros_like(local(gradient), dtype=torch.bool)
            now, before = held.get(name, none), self._before.get(name, none)
            assert not local(gradient)[now].any(), name
            for value in _values(self._training, name):
                assert not value[now | before].any(), name
        self._before = {name: mask.clone() for name, mask in held.items()}
        return self._clip.after_backward()


def train_sparse(rank: int, world_size: int, recipe: Section) -> Sparse:
    """Trains, and looks at weights, gradients and optimizer after every step."""
    training = BareTraining(rank, world_size, Recipe.model_validate(recipe))
    return watched(training, Start())


def train_all_sparse(rank: int, world_size: int, recipes: Sequence[Section]) -> list[Sparse]:
    return [train_sparse(rank, world_size, recipe) for recipe in recipes]


def train_all_with_kernels(
    rank: int, world_size: int, recipe: Section
) -> list[tuple[list[tuple[str, float, float]], list[tuple[int, ...]]]]:
    """Trains twice, the first time with layers as the 2:4 kernels have them, but for the kernels:
    digest, loss and norm of every step, and the shapes that were to be compressed, one by one."""
    found = []
    for kernels in (True, False):
        training = BareTraining(rank, world_size, Recipe.model_validate(recipe))
        assert training.masks is not None
        shapes: list[tuple[int, ...]] = []
        if kernels:
            blocks = training.recipe.workload.blocks(training.model)
            matrices = sparse_matrices(training.model, blocks)
            compress = partial(_noted, shapes)
            use_kernels(training.model, matrices, training.masks.uses_kernels, compress)
        records = training.run(Start(), training.recipe.steps_in_all)
        found.append(([(r.digest, r.loss, r.gradient_norm) for r in records], shapes))
    return found


def _noted(shapes: list[tuple[int, ...]], weight: Tensor) -> Tensor:
    assert int((weight.reshape(-1, 4) != 0).sum(1).max()) <= 2
    shapes.append(tuple(weight.shape))
    return weight


def watched(training: BareTraining, start: Start) -> Sparse:
    """Trains to the last step of the recipe."""
    training.loop = replace(training.loop, clip=_WatchedClip(training, training.loop.clip))
    records, masks = [], []
    for record in training.records(start, training.recipe.steps_in_all):
        records.append(record)
        assert training.masks is not None
        for name, mask in training.masks.shards.items():
            for value in _values(training, name):
                assert not value[mask].any(), name
        if record.layer_sparsity:
            masks.append(whole_masks(training))
    return Sparse(records, whole_zeros(training.model), masks)


def _values(training: BareTraining, name: str) -> list[Tensor]:
    """This rank's shards of a matrix and of the optimizer's running means of it."""
    matrix = training.model.get_parameter(name)
    state = training.optimizer.state[matrix].values()
    return [local(matrix.detach()), *(local(one) for one in state if one.shape == matrix.shape)]


def whole_masks(training: BareTraining) -> Arrays:
    """Collective."""
    assert training.masks is not None
    return {
        name: _whole(_like(training.model.get_parameter(name), mask)) != 0
        for name, mask in training.masks.shards.items()
    }


def whole_zeros(model: nn.Module) -> Arrays:
    """Collective. Biases begin at zero and are none of it."""
    return {
        name: _whole(parameter.detach()) == 0
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    }


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard.to(torch.uint8),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _whole(value: Tensor) -> np.ndarray:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.numpy().copy()


def save_sparse(rank: int, world_size: int, recipe: Section, url: str, at: int) -> Sparse:
    """Trains for `at` steps, saves, and goes on to the end."""
    training = BareTraining(rank, world_size, Recipe.model_validate(recipe))
    assert training.masks is not None
    *_, last = training.records(Start(), at)
    saver = DurableSaver(Storage(url), keep_last=1, keep_best=False, warn=pytest.fail)
    state = training_state(training.model, training.optimizer) | training.masks.state()
    saver.save(state, step=last.step, samples=last.samples, tokens=last.tokens)
    saver.close()
    start = Start(step=last.step, samples=last.samples, tokens=last.tokens)
    before = whole_masks(training)
    run = watched(training, start)
    return replace(run, masks=[before, *run.masks])


def resume_sparse(rank: int, world_size: int, recipe: Section, url: str) -> Sparse:
    """Goes on from what was saved."""
    training = BareTraining(rank, world_size, Recipe.model_validate(recipe))
    assert training.masks is not None
    storage = Storage(url)
    (commit,) = list_commits(storage)
    restore(storage, commit, training.model, training.optimizer)
    training.masks.restore(commit.step, partial(load, storage, commit))
    before = whole_masks(training)
    assert training.masks.figures(0)["layer_sparsity"]  # told anew after a restart
    start = Start(step=commit.step, samples=commit.samples, tokens=commit.tokens)
    run = watched(training, start)
    return replace(run, masks=[before, *run.masks])


def smallest_on_ranks(
    rank: int, world_size: int, keys: Sequence[np.ndarray], counts: Sequence[int], dims: list[int]
) -> list[np.ndarray]:
    """`smallest` of whole matrices that are dealt out over the ranks along `dims`."""
    parts = [_dealt(one, dim, world_size) for one, dim in zip(keys, dims, strict=True)]
    found = smallest(parts, [local(part) for part in parts], counts)
    return [_whole(_like(part, one)) != 0 for part, one in zip(parts, found, strict=True)]


def updated_on_ranks(
    rank: int,
    world_size: int,
    weights: np.ndarray,
    gradient: np.ndarray,
    mask: np.ndarray,
    count: int,
) -> np.ndarray:
    """RigL's update of one matrix, dealt out by rows."""
    matrix, slope, zero = (_dealt(one, 0, world_size) for one in (weights, gradient, mask))
    (new,) = rigl.update_masks([matrix], [slope], [local(zero)], [count])
    return _whole(_like(matrix, new)) != 0


def _dealt(values: np.ndarray, dim: int, world_size: int) -> Tensor:
    mesh = init_device_mesh("cpu", (world_size,))
    placement = Replicate() if dim < 0 else Shard(dim)
    return distribute_tensor(torch.from_numpy(values), mesh, [placement])
