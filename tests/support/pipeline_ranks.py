"""Trains a model in one layout after the other, for the tests of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import restore, training_state
from elastrata.recipe.recipe import Recipe
from elastrata.step.clip import Clip
from elastrata.step.records import StepRecord
from elastrata.step.train_step import StepLoss
from elastrata_pipelines.batches import Start
from elastrata_pipelines.storage import Storage
from support.bare_loop import BareTraining

Section = dict[str, Any]


def travel(
    rank: int, world_size: int, recipe: Section, layouts: Sequence[Section], url: str
) -> list[tuple[list[StepRecord], StepLoss]]:
    """Trains the recipe's steps, the same number in each layout; every one goes on from the state
    that the one before has saved under a URL, each second time as the hot tier saves it.

    Returns:
        The records in each layout, and an evaluation at its end.
    """
    start, found = Start(), []
    for number, layout in enumerate(layouts):
        training = BareTraining(
            rank, world_size, Recipe.model_validate({**recipe, "parallel": layout})
        )
        if number:
            newest = list_commits(Storage(url))[0]
            restore(Storage(url), newest, training.model, training.optimizer)
            start = Start(step=newest.step, samples=newest.samples, tokens=newest.tokens)
        records = training.run(start, recipe["steps"] * (number + 1) // len(layouts))
        found.append((records, training.evaluate(samples=50)))
        saver = DurableSaver(
            Storage(url), keep_last=1, keep_best=False, lean=number % 2 == 1, warn=pytest.fail
        )
        last, state = records[-1], training_state(training.model, training.optimizer)
        saver.save(state, step=last.step, samples=last.samples, tokens=last.tokens)
        saver.close()
    return found


class _MeasuredClip:
    """Looks at what clipping leaves of the gradient, over all stages."""

    def __init__(self, training: BareTraining, clip: Clip) -> None:
        self._model, self._clip = training.model, clip
        self.left: list[float] = []
        """The 2-norm after every step."""

    def before_backward(self, share: float) -> None:
        self._clip.before_backward(share)

    def after_backward(self) -> Tensor:
        norm = self._clip.after_backward()
        squares = {}
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            squares[name] = float(parameter.grad.full_tensor().double().square().sum())
        heard: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(heard, squares)
        whole = {name: square for part in heard for name, square in part.items()}
        for part in heard:  # what two stages have is the same in both
            assert all(whole[name] == square for name, square in part.items())
        self.left.append(sum(whole.values()) ** 0.5)
        return norm


def train_clipped(
    rank: int, world_size: int, recipes: Sequence[Section]
) -> list[tuple[list[StepRecord], list[float]]]:
    """The records of each of some recipes, and the norm of the gradient that clipping leaves."""
    found = []
    for recipe in recipes:
        training = BareTraining(rank, world_size, Recipe.model_validate(recipe))
        clip = _MeasuredClip(training, training.loop.clip)
        training.loop = replace(training.loop, clip=clip)
        found.append((training.run(Start(), recipe["steps"]), clip.left))
    return found
