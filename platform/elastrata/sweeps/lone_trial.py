"""The lone trial: one run trained in this process, with history and checkpoints, without Ray Train.

Everything that a worker of a group does, it does with the same parts; what it saves is a run like
any other, which `status`, `audit`, `export` and `train` take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from elastrata.checkpoints.commit import Commit, commits, folders
from elastrata.checkpoints.training_state import load, restore, training_state
from elastrata.launch.preflight import TrainingData, training_data
from elastrata.recipe.recipe import Recipe
from elastrata.runs import history
from elastrata.runs.folder import RunIdentity, write_identity
from elastrata.runs.unwritten import restore_history
from elastrata.sweeps.past import Past, curve
from elastrata.sweeps.post import Post
from elastrata.sweeps.report import Report
from elastrata.training.device import current_device
from elastrata.training.evaluate import evaluate, evaluation_due, held_out_step
from elastrata.training.optimizer import build_optimizer
from elastrata.training.phases import Phases
from elastrata.training.record import StepRecord
from elastrata.training.request import Act
from elastrata.training.step import StepLoss
from elastrata.training.target import is_over
from elastrata.workers.automatic import CHOSEN, automatic
from elastrata.workers.engine import divided_model, phase_masks, training_loop
from elastrata.workers.events import Evaluated, Started
from elastrata.workers.keeper import Keeper
from elastrata.workers.newest_state import newest_state
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.storage import Storage

_GROUP_TOKENS = 2**20
"""Tokens read and dealt at once: few, as a trial may end soon."""
_SECONDS_TO_SAVE = 600.0


class LoneTrial:
    """A run that goes on as long as reports are asked for.

    The calling process must hold a process group of its own, see `lone_group`.

    Args:
        recipe: what to train, on one worker.
        run: its folder; a run that is there is continued from its newest checkpoint.
        origin: the folder of another run and a checkpoint in it to continue from instead.
        told: evaluations up to this step were reported before; later ones that the run already has
            are reported first.

    Raises:
        UserError: data or checkpoints cannot work.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Storage,
        origin: tuple[Storage, str] | None = None,
        told: int = 0,
    ) -> None:
        torch.set_num_threads(recipe.workers.threads or 1)
        self.recipe, self.run = recipe, run
        self.data = training_data(recipe)
        self.device = current_device()
        self._held_out = _held_out(recipe, self.data)
        vocabulary = self.data.vocabulary
        seq_len = max(phase.batches.manifest.seq_len for phase in self.data.phases)
        self._divided = divided_model(recipe, vocabulary, seq_len, self.device, 1)
        self.model = self._divided.model
        self.optimizer = build_optimizer(
            recipe.optimizer, self.model, recipe.workload.blocks(self.model)
        )
        self._masks = phase_masks(recipe, self._divided)
        checkpoints, self._commit = _origin(run, origin)
        if self._commit:
            restore(checkpoints, self._commit, self.model, self.optimizer)
            if self._masks:
                self._masks.restore(self._commit.step, partial(load, checkpoints, self._commit))
        self._chooser = automatic(
            recipe,
            self.data.phases,
            self._divided.recompute,
            self.device,
            world_size=1,
            per_node=os.cpu_count() or 1,  # as many trials there may be at a time
            known=self._commit.extra.get(CHOSEN, {}) if self._commit else {},
        )
        self.start = _start(self._commit)
        self._post = Post()
        self._record: StepRecord | None = None
        name = run.url.rpartition("/")[2]
        write_identity(run, RunIdentity(name=name, data=self.data.data_sets), recipe)
        attempt = _attempt(run, origin is None)
        self._past = Past.of(run, self.start.step) if origin is None else Past([], [])
        self._told_before = told
        self._reports = self._train(attempt)

    def report(self) -> Report:
        """Trains up to the next evaluation.

        Raises:
            TrainingError: the loss is not finite.
            StopIteration: there was a report of the last step.
        """
        return next(self._reports)

    def evaluation(self) -> Mapping[str, float]:
        """What an evaluation of the model as it is now reports; not part of the run's history."""
        step = self.start.step
        loss = self._loss(self._held_out[self._last_step(step)])
        metrics = {**{f"{term}_loss": v for term, v in loss.terms.items()}, **loss.metrics}
        return Evaluated(step=step, loss=loss.total, metrics=metrics, seconds=0.0).to_metrics()

    def save(self) -> str:
        """Saves the state of the step that was reported last, and waits for it.

        Returns:
            The name of the checkpoint.

        Raises:
            TimeoutError: storage does not take it.
        """
        if self._record is None:
            assert self._commit is not None
            return self._commit.folder
        self._keeper.keep(self._record, Act.SAVE, is_last=True)
        return self._post.committed(self._record.step, _SECONDS_TO_SAVE)

    def close(self) -> None:
        """Ends it where it is. What was not saved by then is lost."""
        self._reports.close()

    def _train(self, attempt: int) -> Generator[Report]:
        recipe, phases = self.recipe, Phases()
        self._keeper = Keeper(
            self.run,
            None,
            attempt=attempt,
            rank=0,
            config=recipe.checkpoint,
            sender=self._post,  # type: ignore[arg-type]
            state=self._state,
            extra=self._chooser.state,
        )
        with self._keeper as keeper:
            keeper.started(
                Started(
                    attempt=attempt,
                    world_size=1,
                    step=self.start.step,
                    state=self.start.tier,
                    pids={},
                    seconds=phases.seconds,
                )
            )
            failure: Exception | None = None
            try:
                yield from self._told(keeper)
            except GeneratorExit:
                keeper.leave()
            except Exception as error:
                keeper.leave()
                failure = error
        if failure:
            raise failure

    def _told(self, keeper: Keeper) -> Iterator[Report]:
        """What the run has done already and was not told, then what it does now."""
        over = False
        for report in self._past.reports():
            over = self._is_end(report.step, report.metrics)
            if report.step > self._told_before or over:
                yield replace(report, state="finished" if over else "running")
        if not over:
            yield from self._new(keeper)

    def _new(self, keeper: Keeper) -> Iterator[Report]:
        recipe, stream = self.recipe, steps_from(self.data.phases, self.start)
        loop = training_loop(
            recipe, self._divided.clip, self.data.vocabulary, self.device, 1, masks=self._masks
        )
        passes = self._divided.passes
        steps, seconds = self._past.unreported(), 0.0
        parts = self._chooser.cut(stream, keeper.chose)
        for done, _ in loop.run(passes, self.optimizer, parts, self.start, keeper.asked):
            self._record = record = replace(done, **self._chooser.figures())
            keeper.stepped(record)
            steps.append(curve(record))
            held_out = self._due(record)
            if held_out is None:
                keeper.keep(record, Act.GO_ON, is_last=False)
                seconds += record.seconds
                continue
            metrics, took = self._evaluated(keeper, record, held_out)
            over = self._is_end(record.step, metrics)
            keeper.keep(record, Act.GO_ON, is_last=over)
            if over:  # who hears of the end may look for the checkpoint
                self._post.committed(record.step, _SECONDS_TO_SAVE)
            yield Report(
                step=record.step,
                samples=record.samples,
                tokens=record.tokens,
                seconds=seconds + record.seconds + took,
                metrics=metrics,
                steps=tuple(steps),
                state="finished" if over else "running",
            )
            if over:
                return
            steps, seconds = [], 0.0

    def _evaluated(
        self, keeper: Keeper, record: StepRecord, held_out: RankStep
    ) -> tuple[Mapping[str, float], float]:
        """What the evaluation after that step reports, and the seconds it took."""
        began = time.perf_counter()
        loss = self._loss(held_out)
        took = time.perf_counter() - began
        return dict(keeper.evaluated(record, loss, took)), took

    def _loss(self, held_out: RankStep) -> StepLoss:
        passes, recipe = self._divided.passes, self.recipe
        rows = self._chooser.as_chosen(held_out).micro_batches
        return evaluate(passes, recipe.workload, rows, self.data.vocabulary, self.device)

    def _state(self) -> dict[str, Any]:
        masks = self._masks.state() if self._masks else {}
        return training_state(self.model, self.optimizer) | masks

    def _last_step(self, step: int) -> int:
        """Of the phase that has that step."""
        return min(last for last in self._held_out if last >= step)

    def _is_end(self, step: int, metrics: Mapping[str, float]) -> bool:
        recipe = self.recipe
        return is_over(step, metrics, steps=recipe.steps_in_all, target=recipe.target)

    def _due(self, record: StepRecord) -> RankStep | None:
        last = self._last_step(record.step)
        is_due = evaluation_due(
            self.recipe.evaluation,
            step=record.step,
            steps=last,
            samples=record.samples,
            batch_samples=record.batch_samples,
        )
        return self._held_out[last] if is_due else None


def steps_from(phases: Iterable[Phase], start: Start) -> Iterator[RankStep]:
    """What is left of a run's steps, all rows of each, read and decoded in this process."""
    for phase in phases:
        stripes = phase.batches.stripes()
        for group in phase.groups(start, max_tokens=_GROUP_TOKENS):
            for payload in phase.batches.payloads(group, 1, stripes):
                yield from decode(payload, phase.batches.manifest.token_dtype)


def _held_out(recipe: Recipe, data: TrainingData) -> dict[int, RankStep]:
    """The held-out data of every phase, by the phase's last step.

    Raises:
        UserError: there is nothing to compare trials by.
    """
    for phase, batches in zip(data.phases, data.held_out, strict=True):
        if batches is None:
            raise UserError(
                f"{phase.batches.url}: has no held-out data, which trials are compared by; prepare "
                "with data.prepare.held_out, or give evaluation.path"
            )
    samples = recipe.evaluation.samples
    return {
        phase.last_step: held_out_step(batches, samples=samples, rank=0, num_ranks=1)
        for phase, batches in zip(data.phases, data.held_out, strict=True)
        if batches
    }


def _origin(run: Storage, origin: tuple[Storage, str] | None) -> tuple[Storage, Commit | None]:
    """Where the state to continue from lies, and which it is; None: a new run.

    A checkpoint of another run that is not there any more gives way to that run's newest one.
    """
    if origin is None:
        start = newest_state(run, None, lambda _: None)
        found = [c for c in commits(run.sub("checkpoints")) if c.folder == start.commit]
        return run.sub("checkpoints"), found[0] if found else None
    other, folder = origin
    there = commits(other.sub("checkpoints"))
    found = [commit for commit in there if commit.folder == folder]
    return other.sub("checkpoints"), (found or there)[0]


def _start(commit: Commit | None) -> Start:
    if commit is None:
        return Start()
    return Start(
        step=commit.step,
        samples=commit.samples,
        tokens=commit.tokens,
        commit=commit.folder,
        tier="durable",
    )


def _attempt(run: Storage, continues: bool) -> int:
    """The number of this life of the run, after its history is whole again."""
    found = commits(run.sub("checkpoints"))
    if found and continues:
        restore_history(run.sub("history"), found[0])
    saved = max((folder.attempt for folder in folders(run.sub("checkpoints"))), default=0)
    return max(history.next_attempt(run.sub("history")), saved + 1)
