"""Trains on some ranks without Ray: the same loop that the workers run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import data_rank
from elastrata.recipe.recipe import Recipe
from elastrata.step.evaluate import evaluate, evaluation_step
from elastrata.step.events import Chosen, RanOut
from elastrata.step.records import StepRecord
from elastrata.step.train_step import StepLoss
from elastrata.trainer.autotune import build_tuner
from elastrata.trainer.build_model import build_divided_model, build_masks
from elastrata.trainer.preflight import find_training_data
from elastrata.trainer.trainer import LoopHooks, build_loop
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.speeds import EQUAL, RankKinds, SpeedSource


def train_on_ranks(rank: int, world_size: int, recipe: dict[str, Any]) -> list[StepRecord]:
    """The records of all the recipe's steps, as this rank saw them."""
    return train_recipe(rank, world_size, Recipe.model_validate(recipe))


def train_recipe(
    rank: int, world_size: int, recipe: Recipe, extra: Mapping[str, Any] | None = None
) -> list[StepRecord]:
    return BareTraining(rank, world_size, recipe, extra).run(Start(), recipe.steps_in_all)


def train_by_speeds(
    rank: int, world_size: int, recipe: dict[str, Any], speeds: SpeedSource
) -> list[StepRecord]:
    """As `train_on_ranks` does, with hands by these speeds."""
    training = BareTraining(rank, world_size, Recipe.model_validate(recipe))
    training.speeds = speeds
    return training.run(Start(), training.recipe.steps_in_all)


def train_automatically(
    rank: int, world_size: int, recipe: dict[str, Any], extra: Mapping[str, Any] | None = None
) -> tuple[list[StepRecord], list[Chosen], dict[str, Any]]:
    """The records, what was chosen, and what a commit would say of it.

    Args:
        rank: this one.
        world_size: ranks.
        recipe: that leaves something open.
        extra: what a commit of groups before said of it.
    """
    training = BareTraining(rank, world_size, Recipe.model_validate(recipe), extra)
    records = training.run(Start(), training.recipe.steps_in_all)
    return records, training.chosen, training.chooser.state()


def train_by_kinds(
    rank: int,
    world_size: int,
    recipe: dict[str, Any],
    kinds: RankKinds,
    memory_gb: Sequence[float],
    extra: Mapping[str, Any] | None = None,
) -> tuple[list[StepRecord], list[Chosen], dict[str, Any], float]:
    """As `train_automatically` does, with so much memory for each rank, and a loss of held-out data
    at the end."""
    own = {**recipe["workers"], "memory_gb": memory_gb[rank]} if memory_gb else recipe["workers"]
    wanted = Recipe.model_validate({**recipe, "workers": own})
    training = BareTraining(rank, world_size, wanted, extra, kinds)
    records = training.run(Start(), training.recipe.steps_in_all)
    return records, training.chosen, training.chooser.state(), training.evaluate(40).total


def train_after_running_out(
    rank: int,
    world_size: int,
    recipe: dict[str, Any],
    kinds: RankKinds,
    extra: Mapping[str, Any],
    culprit: int,
) -> tuple[RanOut | None, list[StepRecord]]:
    """What one rank's choice was when it ran out of memory, and the records of a group that avoids
    that.

    Args:
        rank: this one.
        world_size: ranks.
        recipe: that leaves something open.
        kinds: of the ranks.
        extra: what a commit says of the choices of such a group.
        culprit: the rank whose memory was too small for a step.
    """
    first = BareTraining(rank, world_size, Recipe.model_validate(recipe), extra, kinds)
    first.run(Start(), 1)
    told: list[RanOut | None] = [first.chooser.ran_out() if rank == culprit else None]
    dist.broadcast_object_list(told, src=culprit)
    second = BareTraining(rank, world_size, Recipe.model_validate(recipe), extra, kinds)
    second.chooser.avoid([one for one in told if one])
    return told[0], second.run(Start(), second.recipe.steps_in_all)


class BareTraining:
    """One rank's model, sharded, with its optimizer and its loop."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        extra: Mapping[str, Any] | None = None,
        kinds: RankKinds = (),
    ) -> None:
        data = find_training_data(recipe)
        self.recipe, self._batches = recipe, data.train
        parallel, cpu = recipe.parallel, torch.device("cpu")
        self._data = data_rank(rank, world_size, parallel.tensor, parallel.pipeline)
        manifest = self._batches.manifest
        vocabulary, seq_len = manifest.vocabulary, manifest.seq_len
        divided = build_divided_model(recipe, vocabulary, seq_len, cpu, world_size)
        self.model, self._forward_backward = divided.model, divided.forward_backward
        self.chosen: list[Chosen] = []
        self.speeds, self._kinds = EQUAL, kinds
        self.chooser = build_tuner(
            recipe,
            data.phases,
            divided.recompute,
            cpu,
            world_size=world_size,
            per_node=world_size,
            synchronize=divided.forward_backward.set_gradient_sync,
            kinds=kinds,
            data_rank=self._data.rank,
        )
        self.chooser.restore(extra or {})
        blocks = recipe.workload.blocks(self.model)
        self.optimizer = build_optimizer(recipe.optimizer, self.model, blocks)
        self.masks = build_masks(recipe, divided)
        self.loop = build_loop(
            recipe,
            divided.clip,
            vocabulary,
            cpu,
            world_size,
            is_primary=self._data.is_primary,
            masks=self.masks,
            blocks=blocks,
        )

    def run(self, start: Start, steps: int) -> list[StepRecord]:
        """The records of the steps from `start` to step `steps` of the run."""
        return list(self.records(start, steps))

    def records(self, start: Start, steps: int) -> Iterator[StepRecord]:
        """The same, one by one as they are done."""
        run = self.loop.run(
            self._forward_backward,
            self.optimizer,
            self._stream(start, steps),
            start,
            LoopHooks(on_choice=self.chosen.append),
            chooser=self.chooser,
        )
        return (record for record, _ in run)

    def evaluate(self, samples: int) -> StepLoss:
        """Over so many of the training samples."""
        workload, manifest = self.recipe.workload, self._batches.manifest
        data = self._data
        part = evaluation_step(
            self._batches,
            samples=samples,
            rank=data.rank,
            num_ranks=data.dp_size,
            kinds=self._kinds,
        )
        return evaluate(
            self._forward_backward,
            workload,
            self.chooser.cut_step(part).micro_batches,
            manifest.vocabulary,
            torch.device("cpu"),
            is_primary=data.is_primary,
        )

    def _stream(self, start: Start, steps: int) -> Iterator[RankStep]:
        groups = self._batches.groups(
            start,
            steps=steps,
            batch_size=self.recipe.batch_size,
            max_tokens=4096,
            warmup=self.recipe.batch_size_warmup,
        )
        mine = self._data.rank
        for group in groups:
            speeds = self.speeds(group.first_step)
            payloads = self._batches.payloads(
                group, self._data.dp_size, speeds=speeds, kinds=self._kinds
            )
            for payload in islice(payloads, mine, mine + 1):
                yield from decode(payload, self._batches.manifest.token_dtype)
