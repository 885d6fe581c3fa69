"""Ranks that train on a CPU in the way of a GPU: the next step is made ready by a thread, and an
update with what is not finite is left out by the optimizer's kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from elastrata.recipe.recipe import Recipe
from elastrata.step import train_step as step
from elastrata.step.events import Chosen
from elastrata.step.prefetch import BackgroundThread
from elastrata.step.records import StepRecord
from elastrata.trainer import trainer
from elastrata_pipelines.batches import Start
from support.bare_loop import BareTraining
from support.poison import PoisonedBert

CPU = torch.device("cpu")


def train_ahead(
    rank: int, world_size: int, recipe: dict[str, Any], stops: tuple[int, ...] = ()
) -> tuple[list[StepRecord], int, int]:
    """Trains a model that cannot stand long samples. In groups of steps, each of a new stream,
    that begin behind the steps of `stops`; a group's stream goes on to the run's end.

    Returns:
        The records; how many steps had a message of their own for the sums over the batch; how
        many threads were left.
    """
    plain = Recipe.model_validate(recipe)
    workload = PoisonedBert.model_validate(recipe["workload"])
    training = _ahead(rank, world_size, plain.model_copy(update={"workload": workload}))
    records: list[StepRecord] = []
    with _as_on_a_gpu() as summed:
        for last in (*stops, plain.steps_in_all):
            newest = records[-1] if records else None
            start = Start(
                step=newest.step if newest else 0,
                samples=newest.samples if newest else 0,
                tokens=newest.tokens if newest else 0,
            )
            run = training.records(start, plain.steps_in_all)
            with closing(run):
                for record in run:
                    records.append(record)
                    if record.step == last:
                        break
    return records, len(summed), _threads()


def choose_ahead(
    rank: int, world_size: int, recipe: dict[str, Any]
) -> tuple[list[StepRecord], list[Chosen], int]:
    """The records of a recipe that leaves something open, what was chosen, and how many steps had
    a message of their own for the sums over the batch."""
    training = _ahead(rank, world_size, Recipe.model_validate(recipe))
    with _as_on_a_gpu() as summed:
        records = training.run(Start(), training.recipe.steps_in_all)
    return records, training.chosen, len(summed)


def _ahead(rank: int, world_size: int, recipe: Recipe) -> BareTraining:
    training = BareTraining(rank, world_size, recipe)
    training.loop = replace(training.loop, background=lambda _: BackgroundThread(CPU))
    return training


@contextmanager
def _as_on_a_gpu() -> Iterator[list[None]]:
    summed: list[None] = []
    reduce_sums = trainer.reduce_sums

    def counted(*args: Any, **kwargs: Any) -> dict[str, float]:
        summed.append(None)
        return reduce_sums(*args, **kwargs)

    with (
        patch.object(trainer, "reduce_sums", counted),
        patch.object(step, "skips_on_device", lambda optimizer, device: True),
    ):
        yield summed


def _threads() -> int:
    """Return how many threads do not end."""
    threads = [t for t in threading.enumerate() if t.name == "elastrata background"]
    for thread in threads:
        thread.join(300 / len(threads))  # they may still be about to end
    return sum(thread.is_alive() for thread in threads)
