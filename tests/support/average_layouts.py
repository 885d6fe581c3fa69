"""Trainers that average their weights, in one layout after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.parallel.mesh import DataRank, data_rank
from elastrata.recipe.recipe import Recipe
from elastrata.step.evaluate import OWN
from elastrata.trainer.evaluation import HeldOutData
from elastrata.trainer.preflight import TrainingData, find_training_data
from elastrata.trainer.trainer import LoopHooks, Trainer
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.storage import Storage

Section = dict[str, Any]
STEPS = 2
"""In each layout."""


def go_on_averaging(rank: int, world_size: int, recipe: Section, url: str, is_lean: bool) -> float:
    """Goes on for some steps from the newest state under a URL, or begins, and saves there: as
    copies in memory are saved if `is_lean`. The held-out loss of the average."""
    wanted, storage = Recipe.model_validate(recipe), Storage(url)
    data, parallel = find_training_data(wanted), wanted.parallel
    place = data_rank(rank, world_size, parallel.tensor, parallel.pipeline)
    trainer = Trainer(
        wanted,
        data.phases,
        torch.device("cpu"),
        world_size=world_size,
        per_node=world_size,
        place=place,
    )
    start = _restored(trainer, storage)
    steps = trainer.steps(_stream(data, place, start), start, LoopHooks())
    with closing(steps):
        *_, (last, _) = islice(steps, STEPS)
    saver = DurableSaver(storage, keep_last=1, keep_best=False, lean=is_lean, warn=pytest.fail)
    saver.save(trainer.state(), step=last.step, samples=last.samples, tokens=last.tokens)
    saver.close()
    held_out = HeldOutData(data.phases, data.evaluated, wanted.evaluation, place, last.step)
    losses, _ = trainer.evaluate(held_out.of(last.step))
    return losses[OWN].total


def _restored(trainer: Trainer, storage: Storage) -> Start:
    saved = list_commits(storage)
    if not saved:
        trainer.begin()
        return Start()
    newest = saved[0]
    trainer.restore(storage, newest)
    return Start(step=newest.step, samples=newest.samples, tokens=newest.tokens)


def _stream(data: TrainingData, place: DataRank, start: Start) -> Iterator[RankStep]:
    """This rank's part of the steps that are left."""
    (phase,) = data.phases
    stripes = phase.batches.stripes()
    for group in phase.groups(start, max_tokens=4096):
        payloads = phase.batches.payloads(group, place.dp_size, stripes)
        for payload in islice(payloads, place.rank, place.rank + 1):
            yield from decode(payload, phase.batches.manifest.token_dtype)
