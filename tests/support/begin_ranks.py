"""Runs that begin with weights, as the ranks of a group have them before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastrata.parallel.mesh import data_rank
from elastrata.recipe.recipe import Recipe
from elastrata.step.evaluate import OWN
from elastrata.trainer.evaluation import HeldOutData
from elastrata.trainer.initial_weights import find_parent, keep_rows
from elastrata.trainer.preflight import find_training_data
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.storage import Storage

Section = dict[str, Any]


class Begun:
    """One rank's part of a run that has begun and done no step."""

    def __init__(self, rank: int, world_size: int, recipe: Recipe, run: Path) -> None:
        data = find_training_data(recipe)
        self.lines: list[str] = []
        self.parent = find_parent(Storage(str(run)), recipe, data, self.lines.append)
        recipe = keep_rows(recipe, data, self.parent.num_ids) if self.parent else recipe
        self.recipe, parallel = recipe, recipe.parallel
        place = data_rank(rank, world_size, parallel.tensor, parallel.pipeline)
        self.trainer = Trainer(
            recipe,
            data.phases,
            torch.device("cpu"),
            world_size=world_size,
            per_node=world_size,
            place=place,
        )
        self.trainer.begin(self.parent)
        self._held_out = HeldOutData(data.phases, data.evaluated, recipe.evaluation, place, 0)

    def loss(self) -> float:
        """Of the held-out data. Collective."""
        losses, _ = self.trainer.evaluate(self._held_out.of(0))
        return losses[OWN].total

    def weights(self) -> dict[str, Tensor]:
        """Whole, those of this rank's stage. Collective."""
        return _whole(self.trainer.model.state_dict())


def first_losses(rank: int, world_size: int, cases: Sequence[tuple[Section, str]]) -> list[float]:
    """The held-out loss that each of some recipes begins with, in a run's folder."""
    found = []
    for values, run in cases:
        recipe = Recipe.model_validate(values)
        found.append(Begun(rank, world_size, recipe, Path(run)).loss())
        dist.barrier()
    return found


def optimizer_states(
    rank: int, world_size: int, recipe: Section, run: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and the optimizer's state that a run begins with, those of this rank's stage."""
    begun = Begun(rank, world_size, Recipe.model_validate(recipe), Path(run))
    return begun.weights(), _whole(begun.trainer.state()["optimizer"])


def _whole(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }
