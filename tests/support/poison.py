"""A workload whose loss is not a number where a batch holds a sample of full length."""

from __future__ import annotations

from typing import Any

from torch import nn

from elastrata.device.device_transfer import collectives_aborted
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


class AbortedBert(Bert):
    """BERT whose collectives are aborted by a peer's failure in the first step: what they have
    reduced is no number."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        collectives_aborted.set()
        return Loss({"mlm": loss.terms["mlm"] * float("nan")}, loss.metrics)


def train_aborted(rank: int, world_size: int, recipe: dict[str, Any]) -> str:
    """The class of the error that ends the training."""
    plain = Recipe.model_validate(recipe)
    workload = AbortedBert.model_validate(recipe["workload"])
    try:
        train_recipe(rank, world_size, plain.model_copy(update={"workload": workload}))
    except Exception as error:
        return type(error).__name__
    finally:
        collectives_aborted.clear()
    return "none"
