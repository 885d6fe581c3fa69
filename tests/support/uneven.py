"""A small sharded training whose tensors no world size divides, for the tests of optimizers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import restore, training_state
from elastrata.optim.optimizer import OptimizerConfig, build_optimizer
from elastrata.parallel.mesh import rank_mesh
from elastrata.parallel.parallelize import ParallelConfig, parallelize
from elastrata_pipelines.storage import Storage

ROWS, VOCABULARY, WIDTH = 12, 11, 5
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "broadcast")
Arrays = dict[str, np.ndarray]
Section = dict[str, Any]


class Uneven(nn.Module):
    """Tied embedding and head, and two blocks with matrices of 4, 2 and 5 rows: over three ranks
    the first two leave a rank without any."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, WIDTH))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.norm(hidden) @ self.embedding.weight.T
        return logits


class Training:
    """The model, sharded, with an optimizer, from a recipe's sections."""

    def __init__(self, optimizer: Section, parallel: Section) -> None:
        torch.manual_seed(1)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.model = Uneven()
        blocks, layout = list(self.model.blocks), ParallelConfig.model_validate(parallel)
        parallelize(
            self.model,
            blocks,
            rank_mesh("cpu", self.size, layout.replicate),
            precision="fp32",
            activation_checkpointing="none",
            compile=False,
            parallel=layout,
        )
        config = TypeAdapter(OptimizerConfig).validate_python(optimizer)
        self.optimizer = build_optimizer(config, self.model, blocks)

    def steps(self, first: int, last: int) -> None:
        for seed in range(first, last):
            ids = torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(seed))
            mine = ids[self.rank :: self.size]
            loss = nn.functional.cross_entropy(self.model(mine), (mine + 1) % VOCABULARY)
            (loss * len(mine) / ROWS).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def full(self) -> Arrays:
        """Copies of all tensors of the state, whole. Collective."""
        return {
            f"{part}.{name}": _whole(value).numpy().copy()
            for part, tensors in training_state(self.model, self.optimizer).items()
            for name, value in tensors.items()
        }


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(rank: int, world_size: int, optimizer: Section, parallel: Section) -> Arrays:
    training = Training(optimizer, parallel)
    training.steps(0, 6)
    return training.full()


def all_trained(
    rank: int, world_size: int, optimizers: dict[str, Section], parallel: Section
) -> dict[str, Arrays]:
    return {name: trained(rank, world_size, o, parallel) for name, o in optimizers.items()}


def collectives_of_a_step(rank: int, world_size: int, optimizer: Section) -> dict[str, int]:
    """How many of each kind the optimizer makes itself."""
    training = Training(optimizer, {})
    ids = torch.arange(ROWS) % VOCABULARY
    training.model(ids).sum().backward()
    wrapped = {name: patch.object(dist, name, wraps=getattr(dist, name)) for name in COLLECTIVES}
    seen = {name: wrap.start() for name, wrap in wrapped.items()}
    training.optimizer.step()
    for wrap in wrapped.values():
        wrap.stop()
    return {name: spy.call_count for name, spy in seen.items() if spy.call_count}


def saved_and_gone_on(
    rank: int, size: int, optimizer: Section, parallel: Section, url: str
) -> list[Arrays]:
    """The state that was saved, and that three steps later."""
    training = Training(optimizer, parallel)
    training.steps(0, 3)
    saving = DurableSaver(Storage(url), keep_last=1, keep_best=False, warn=pytest.fail)
    saving.save(training_state(training.model, training.optimizer), step=3, samples=3, tokens=3)
    saving.close()
    before = training.full()
    training.steps(3, 6)
    return [before, training.full()]


def restored_and_gone_on(
    rank: int, size: int, optimizer: Section, parallel: Section, url: str
) -> list[Arrays]:
    """The state that was restored, and that three steps later."""
    training = Training(optimizer, parallel)
    storage = Storage(url)
    (commit,) = list_commits(storage)
    restore(storage, commit, training.model, training.optimizer)
    before = training.full()
    training.steps(3, 6)
    return [before, training.full()]
