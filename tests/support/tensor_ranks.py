"""Trains models divided over ranks, for the tests of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import restore, training_state
from elastrata.recipe.recipe import Recipe
from elastrata.step.norms import gradient_norm
from elastrata.step.records import StepRecord
from elastrata.step.train_step import StepLoss
from elastrata_pipelines.batches import Start
from elastrata_pipelines.storage import Storage
from support.bare_loop import BareTraining, train_on_ranks

Section = dict[str, Any]


def train_all(rank: int, world_size: int, recipes: Sequence[Section]) -> list[list[StepRecord]]:
    """The records of each of some recipes, one run after the other."""
    return [train_on_ranks(rank, world_size, recipe) for recipe in recipes]


def norms_of_weights(rank: int, world_size: int, recipe: Section) -> tuple[float, float]:
    """Of all weights together: as gradients are measured on CPUs, and as on GPUs."""
    model = BareTraining(rank, world_size, Recipe.model_validate(recipe)).model
    weights = [parameter.detach() for parameter in model.parameters()]
    on_gpus = torch.nn.utils.get_total_norm(weights, foreach=True)
    assert isinstance(on_gpus, DTensor)
    return float(gradient_norm(weights)), float(on_gpus.full_tensor())


def save_all(rank: int, world_size: int, runs: Sequence[tuple[Section, str]], steps: int) -> None:
    """Trains each of some recipes for so many steps, and saves its state under a URL."""
    for recipe, url in runs:
        training = BareTraining(rank, world_size, Recipe.model_validate(recipe))
        last = training.run(Start(), steps)[-1]
        saver = DurableSaver(Storage(url), keep_last=1, keep_best=False, warn=pytest.fail)
        state = training_state(training.model, training.optimizer)
        saver.save(state, step=last.step, samples=last.samples, tokens=last.tokens)
        saver.close()


def resume_all(
    rank: int, world_size: int, runs: Sequence[tuple[Section, str]]
) -> list[tuple[list[StepRecord], StepLoss]]:
    """Continues each of some recipes from the state under a URL to its last step, and evaluates."""
    return [_resume(rank, world_size, Recipe.model_validate(recipe), url) for recipe, url in runs]


def _resume(
    rank: int, world_size: int, recipe: Recipe, url: str
) -> tuple[list[StepRecord], StepLoss]:
    training = BareTraining(rank, world_size, recipe)
    (commit,) = list_commits(Storage(url))
    restore(Storage(url), commit, training.model, training.optimizer)
    start = Start(step=commit.step, samples=commit.samples, tokens=commit.tokens)
    return training.run(start, recipe.steps), training.evaluate(samples=50)
