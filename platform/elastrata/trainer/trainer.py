"""The trainer: one rank's part of a recipe's model, with all that changes while it learns.

Knows no Ray: every worker of a group has one, and so has the lone trial of a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from elastrata.checkpoints.commit import FRESH_OPTIMIZER, Commit, CommitStorage
from elastrata.checkpoints.state import load, part_is_saved, restore, training_state
from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import ALONE, DataRank
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import Parent
from elastrata.step.average import AVERAGE, WeightAverage
from elastrata.step.evaluate import evaluate
from elastrata.step.events import Action, Chosen, RanOut, RanOutError
from elastrata.step.records import StepRecord
from elastrata.step.step_message import Effort
from elastrata.step.train_step import StepLoss
from elastrata.trainer.autotune import automatic
from elastrata.trainer.build_model import divided_model, phase_masks, training_loop, weight_average
from elastrata.trainer.initial_weights import begin_with
from elastrata.trainer.loop import unmeasured
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep, in_turn
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKinds


class Trainer:
    """Model, optimizer, masks and what is chosen automatically. All its methods are collective;
    the first is `begin` or `restore`.

    Args:
        recipe: what is trained.
        phases: of the run.
        device: of this rank.
        world_size: ranks of the process group.
        per_node: how many of them share this machine, and its memory.
        place: of this rank among those that have samples.
        kinds: of the data ranks, by their memory; none: they are of one kind.
    """

    def __init__(
        self,
        recipe: Recipe,
        phases: Sequence[Phase],
        device: torch.device,
        *,
        world_size: int,
        per_node: int,
        place: DataRank = ALONE,
        kinds: RankKinds = (),
    ) -> None:
        self._recipe, self._device = recipe, device
        self._world_size, self._place = world_size, place
        self._vocabulary = phases[0].batches.manifest.vocabulary
        self._seq_len = max(phase.batches.manifest.seq_len for phase in phases)
        self._divided = divided_model(
            recipe, self._vocabulary, self._seq_len, device, world_size, draws=False
        )
        self.model = self._divided.model
        self.optimizer = build_optimizer(
            recipe.optimizer, self.model, recipe.workload.blocks(self.model)
        )
        self._masks = phase_masks(recipe, self._divided)
        self._average = weight_average(recipe, self.model)
        self._chooser = automatic(
            recipe,
            phases,
            self._divided.recompute,
            device,
            world_size=world_size,
            per_node=per_node,
            synchronize=self._divided.forward_backward.synchronizes,
            kinds=kinds,
            data_rank=place.rank,
        )

    def begin(self, parent: Parent | None = None) -> None:
        """Begins a new run: draws the model's first weights, and reads those that a parent has.

        Raises:
            UserError: the parent is not there any more, or damaged.
        """
        self._divided.draw()
        if parent:
            model = self._recipe.workload, self._vocabulary, self._seq_len
            begin_with(parent, *model, self.model, self.optimizer)
        if self._average:
            self._average.begin()

    def restore(self, checkpoints: CommitStorage, commit: Commit) -> None:
        """Goes on from a commit.

        Raises:
            UserError: it is damaged, or another model's.
        """
        optimizers = () if commit.extra.get(FRESH_OPTIMIZER) else (self.optimizer,)
        restore(checkpoints, commit, self.model, *optimizers)
        if self._masks:
            self._masks.restore(commit.step, partial(load, checkpoints, commit))
        if self._average:
            self._restore_average(self._average, checkpoints, commit)
        self._chooser.restore(commit.extra)

    def avoid(self, choices: Iterable[RanOut]) -> None:
        """Takes none of the choices that ran out of memory in groups before this one."""
        self._chooser.avoid(choices)

    def state(self) -> dict[str, Any]:
        """The live tensors that a checkpoint holds."""
        masks = self._masks.state() if self._masks else {}
        average = self._average.state() if self._average else {}
        return training_state(self.model, self.optimizer) | masks | average

    def extra(self) -> dict[str, Any]:
        """Values that a commit keeps beside them."""
        return self._chooser.state()

    def steps(
        self,
        stream: Iterable[RankStep],
        start: Start,
        *,
        chose: Callable[[Chosen], None],
        asked: Callable[[], Action],
        before_change: Callable[[], None],
        measured: Callable[[RankStep, Sequence[Effort]], None] = unmeasured,
    ) -> Generator[tuple[StepRecord, Action]]:
        """Trains.

        Yields:
            The record of every step, and what all ranks agree to do after it. Nothing goes on
            beside the training once this is closed.

        Raises:
            MisdealtError: the stream has other ranks' steps, or others than those that are left.
        """
        recipe, chooser = self._recipe, self._chooser
        loop = training_loop(
            recipe,
            self._divided.clip,
            self._vocabulary,
            self._device,
            self._world_size,
            is_primary=self._place.is_primary,
            masks=self._masks,
            blocks=() if recipe.compile else self._divided.blocks,
        )
        run = loop.run(
            self._divided.forward_backward,
            self.optimizer,
            in_turn(
                stream,
                self._place.rank,
                self._place.dp_size,
                done=start.step,
                last=recipe.steps_in_all,
            ),
            start,
            asked,
            cut=partial(chooser.cut, tell=chose),
            foreseen=chooser.foreseen,
            before_change=before_change,
            measured=measured,
        )
        with self._demoting(), closing(run):
            for done, action in run:
                if self._average and not done.skipped:
                    self._average.stepped(done.step)
                yield replace(done, **chooser.figures()), action

    def evaluate(self, held_out: Mapping[str, RankStep]) -> tuple[dict[str, StepLoss], float]:
        """The losses of the model as it is now, or of its average where that is to be evaluated,
        on this rank's part of each set of held-out data, and the seconds that took."""
        began = time.perf_counter()
        with self._demoting(), self._evaluated():
            losses = {name: self._loss(step) for name, step in held_out.items()}
        return losses, time.perf_counter() - began

    def _loss(self, held_out: RankStep) -> StepLoss:
        return evaluate(
            self._divided.forward_backward,
            self._recipe.workload,
            self._chooser.as_chosen(held_out).micro_batches,
            self._vocabulary,
            self._device,
            is_primary=self._place.is_primary,
        )

    def _restore_average(
        self, average: WeightAverage, checkpoints: CommitStorage, commit: Commit
    ) -> None:
        """That of the commit; where it has none, it begins here."""
        if part_is_saved(checkpoints, commit, AVERAGE):
            load(checkpoints, commit, average.state())
        else:
            average.begin()

    def _evaluated(self) -> AbstractContextManager[None]:
        """Has the weights in place that are to be evaluated."""
        config = self._recipe.average
        is_average = self._average and config and config.evaluated
        return self._average.in_place() if self._average and is_average else nullcontext()

    @contextmanager
    def _demoting(self) -> Iterator[None]:
        """Memory that runs out in its block is told as the choice that needs too much of it, where
        there is a smaller one."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if ran_out := self._chooser.ran_out():
                raise RanOutError(ran_out) from error
            raise
