"""The trainer: one rank's part of a recipe's model, with all state that training changes.

It does not depend on Ray. Every worker of a group has a trainer, and so has the trial of a sweep.
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
    """Model, optimizer, masks and automatic choices. All methods are collective. The first to call
    is `begin` or `restore`.

    Args:
        recipe: the recipe.
        phases: the run's phases.
        device: of this rank.
        world_size: ranks of the process group.
        per_node: number of ranks that share this machine and its memory.
        place: of this rank among the data ranks.
        kinds: kinds of the data ranks, by their memory; empty if all are of one kind.
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
        """Begin a new run: initialise the weights at random, then load those that a parent has.

        Raises:
            UserError: the parent is missing or damaged.
        """
        # First at random, also with a parent: it may lack rows of new token ids.
        self._divided.draw()
        if parent:
            model = self._recipe.workload, self._vocabulary, self._seq_len
            begin_with(parent, *model, self.model, self.optimizer)
        if self._average:
            self._average.begin()

    def restore(self, checkpoints: CommitStorage, commit: Commit) -> None:
        """Resume from a commit.

        Raises:
            UserError: the commit is damaged or belongs to another model.
        """
        # After a fork with another optimizer, its saved state fits no longer.
        optimizers = () if commit.extra.get(FRESH_OPTIMIZER) else (self.optimizer,)
        restore(checkpoints, commit, self.model, *optimizers)
        if self._masks:
            self._masks.restore(commit.step, partial(load, checkpoints, commit))
        if self._average:
            self._restore_average(self._average, checkpoints, commit)
        self._chooser.restore(commit.extra)

    def avoid(self, choices: Iterable[RanOut]) -> None:
        """Exclude the choices that ran out of memory in earlier groups."""
        self._chooser.avoid(choices)

    def state(self) -> dict[str, Any]:
        """Return the live tensors of a checkpoint."""
        masks = self._masks.state() if self._masks else {}
        average = self._average.state() if self._average else {}
        return training_state(self.model, self.optimizer) | masks | average

    def extra(self) -> dict[str, Any]:
        """Return further values for the commit."""
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
        """Train on the steps of a stream.

        Yields:
            The record of every step, and the action that all ranks have agreed on. Once the
            generator is closed, no background work is left.

        Raises:
            MisdealtError: the stream has steps of other ranks, or not the remaining steps.
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
            # Hooks in blocks would interrupt compiled graphs.
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
        with self._convert_out_of_memory(), closing(run):
            for done, action in run:
                # A skipped step changed no weights.
                if self._average and not done.skipped:
                    self._average.stepped(done.step)
                # The choice is known to the chooser only, so it is added here to the loop's record.
                yield replace(done, **chooser.figures()), action

    def evaluate(self, held_out: Mapping[str, RankStep]) -> tuple[dict[str, StepLoss], float]:
        """Evaluate the model, or its average if the recipe says so, on each set of held-out data.

        Returns:
            The losses by name of the set, over all ranks, and the seconds that this took.
        """
        began = time.perf_counter()
        with self._convert_out_of_memory(), self._evaluated_weights():
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
        """Restore the average from a commit, or start it here if the commit has none."""
        if part_is_saved(checkpoints, commit, AVERAGE):
            load(checkpoints, commit, average.state())
        else:
            average.begin()

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to evaluate."""
        config = self._recipe.average
        is_average = self._average and config and config.evaluated
        return self._average.in_place() if self._average and is_average else nullcontext()

    @contextmanager
    def _convert_out_of_memory(self) -> Iterator[None]:
        """Raise `RanOutError` with the choice that ran out of memory, if a smaller one exists."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if ran_out := self._chooser.ran_out():
                raise RanOutError(ran_out) from error
            raise
