"""A workload whose loss is not a number where a batch holds a sample of full length."""

from __future__ import annotations

from typing import Any

from torch import nn

from elastrata.recipe.recipe import Recipe
from elastrata.step.records import StepRecord
from elastrata.workload.workload import Loss
from elastrata_workloads.bert import Bert
from support.bare_loop import train_recipe
from support.synthetic import SEQ_LEN


class PoisonedBert(Bert):
    """BERT that cannot stand long samples."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        if max(batch.segment_lengths) < SEQ_LEN:
            return loss
        return Loss({"mlm": loss.terms["mlm"] * float("nan")}, loss.metrics)


def train_poisoned(rank: int, world_size: int, recipe: dict[str, Any]) -> list[StepRecord]:
    plain = Recipe.model_validate(recipe)
    workload = PoisonedBert.model_validate(recipe["workload"])
    return train_recipe(rank, world_size, plain.model_copy(update={"workload": workload}))
