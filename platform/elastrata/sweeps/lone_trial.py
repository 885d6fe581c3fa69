"""The lone trial: one run trained in this process, with history and checkpoints, without Ray Train.

Everything that a worker of a group does, it does with the same parts; what it saves is a run like
any other, which `status`, `audit`, `export` and `train` take.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from threading import Condition

import torch

from elastrata.checkpoints.commit import Commit, commits
from elastrata.core.control_signal import Action, ControlSignal
from elastrata.core.device import current_device
from elastrata.core.evaluate import evaluated
from elastrata.core.events import Committed, Event, Started
from elastrata.core.mesh import data_rank
from elastrata.core.record import StepRecord
from elastrata.core.stopwatch import Stopwatch
from elastrata.core.target import is_over
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import RunIdentity, read_identity, write_identity
from elastrata.run.history import take_over
from elastrata.sweeps.past import Past, curve
from elastrata.sweeps.standings import Report
from elastrata.trainer.attempt import attempt
from elastrata.trainer.checkpoint_manager import CheckpointManager
from elastrata.trainer.held_out import HeldOut
from elastrata.trainer.newest_state import newest_state, start_after
from elastrata.trainer.parent import find_parent
from elastrata.trainer.preflight import TrainingData, training_data
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.rank_kinds import RankKinds
from elastrata_pipelines.storage import Storage

_GROUP_TOKENS = 2**20
"""Tokens read and dealt at once: few, as a trial may end soon."""
_SECONDS_TO_SAVE = 600.0


class LoneChannel:
    """A channel that remembers which checkpoints are complete."""

    def __init__(self) -> None:
        self._folders: dict[int, str] = {}
        self._changed = Condition()

    def send(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Committed):
            with self._changed:
                self._folders[event.step] = event.uri.rpartition("/")[2]
                self._changed.notify_all()

    def look(self) -> ControlSignal | None:
        """Nobody asks for anything."""
        return None

    def flush(self) -> None:
        """Nothing is under way."""

    def committed(self, step: int, seconds: float) -> str:
        """The folder of the commit of that step; waits for it.

        Raises:
            TimeoutError: it is not complete within so many seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: step in self._folders, seconds):
                raise TimeoutError(f"the checkpoint of step {step} was not saved")
            return self._folders[step]


class LoneTrial:
    """A run that goes on as long as reports are asked for.

    The calling process must hold a process group of its own, see `lone_group`.

    Args:
        recipe: what to train, on one worker.
        run: its folder; a run that is there is continued from its newest checkpoint.
        origin: the folder of another run and a checkpoint in it to continue from instead.
        told: evaluations up to this step were reported before; later ones that the run already has
            are reported first.
        kinds: of its only rank, where that has room for fewer tokens.

    Raises:
        UserError: data or checkpoints cannot work.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Storage,
        origin: tuple[Storage, str] | None = None,
        told: int = 0,
        kinds: RankKinds = (),
    ) -> None:
        self._kinds = kinds
        torch.set_num_threads(recipe.workers.threads or 1)
        self.recipe, self.run = recipe, run
        identity = read_identity(run)
        fork_origin = identity.origin if identity else None
        data = training_data(recipe, fork_origin)
        _check_held_out(data)
        self._phases = data.phases
        parent = find_parent(run, recipe, data, _nothing)
        self._trainer = Trainer(
            recipe,
            data.phases,
            current_device(),
            world_size=1,
            per_node=os.cpu_count() or 1,  # as many trials there may be at a time
            kinds=kinds,
        )
        checkpoints, self._commit = _origin(run, origin)
        if self._commit:
            self._trainer.restore(checkpoints, self._commit)
        else:
            self._trainer.begin(parent)
        self.start = start_after(self._commit)
        self._held_out = HeldOut(
            data.phases,
            data.evaluated,
            recipe.evaluation,
            data_rank(0, 1, 1),
            self.start.step,
            has_parent=parent is not None,
            kinds=kinds,
        )
        self._channel = LoneChannel()
        self._record: StepRecord | None = None
        name = run.url.rpartition("/")[2]
        own = RunIdentity(
            name=name,
            data=data.data_sets,
            parent=parent,
            origin=fork_origin,
            mixtures=data.mixtures,
        )
        write_identity(run, own, recipe)
        number = take_over(run, self._commit if origin is None else None)
        self._past = Past.of(run, _refuse, self.start.step) if origin is None else Past([], [])
        self._told_before = told
        self._reports = self._train(number)

    def report(self) -> Report:
        """Trains up to the next evaluation.

        Raises:
            TrainingError: the loss is not finite.
            StopIteration: there was a report of the last step.
        """
        return next(self._reports)

    def evaluation(self) -> Mapping[str, float]:
        """The metrics of the model as it is now; not part of the run's history."""
        step = self.start.step
        losses, seconds = self._trainer.evaluate(self._held_out.of(step))
        return evaluated(step, losses, seconds).to_metrics()

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
        self._manager.keep(self._record, Action.SAVE, is_last=True)
        return self._channel.committed(self._record.step, _SECONDS_TO_SAVE)

    def close(self) -> None:
        """Ends it where it is. What was not saved by then is lost."""
        self._reports.close()

    def _train(self, number: int) -> Generator[Report]:
        stopwatch = Stopwatch()
        self._manager = CheckpointManager(
            self.run,
            None,
            attempt=number,
            rank=0,
            config=self.recipe.checkpoint,
            channel=self._channel,
            state=self._trainer.state,
            extra=self._trainer.extra,
            on_gpu=current_device().type == "cuda",
        )
        with self._manager as manager:
            manager.started(
                Started(
                    attempt=number,
                    world_size=1,
                    step=self.start.step,
                    state="durable" if self._commit else "new",
                    pids={},
                    seconds=stopwatch.seconds,
                )
            )
            failure: Exception | None = None
            try:
                yield from self._told(manager)
            except GeneratorExit:
                manager.leave()
            except Exception as error:
                manager.leave()
                failure = error
        if failure:
            raise failure

    def _told(self, manager: CheckpointManager) -> Iterator[Report]:
        """The reports of earlier steps that were not told, then those of the steps it does now."""
        over = False
        for report in self._past.reports():
            over = self._is_end(report.step, report.metrics)
            if report.step > self._told_before or over:
                yield replace(report, state="finished" if over else "running")
        if not over:
            yield from self._new(manager)

    def _new(self, manager: CheckpointManager) -> Iterator[Report]:
        steps, seconds = self._past.unreported(), 0.0
        for step in attempt(
            self._trainer,
            manager,
            self._held_out,
            steps_from(self._phases, self.start, self._kinds),
            self.start,
            steps=self.recipe.steps_in_all,
            target=self.recipe.target,
        ):
            self._record = record = step.record
            steps.append(curve(record))
            seconds += record.seconds + step.evaluation_seconds
            if step.is_last:  # who hears of the end may look for the checkpoint
                self._channel.committed(record.step, _SECONDS_TO_SAVE)
            if step.metrics:
                yield Report(
                    step=record.step,
                    samples=record.samples,
                    tokens=record.tokens,
                    seconds=seconds,
                    metrics=step.metrics,
                    steps=tuple(steps),
                    state="finished" if step.is_last else "running",
                )
                steps, seconds = [], 0.0

    def _is_end(self, step: int, metrics: Mapping[str, float]) -> bool:
        recipe = self.recipe
        return is_over(step, metrics, steps=recipe.steps_in_all, target=recipe.target)


def steps_from(phases: Iterable[Phase], start: Start, kinds: RankKinds = ()) -> Iterator[RankStep]:
    """The steps that are left of a run, all rows of each, read and decoded in this process."""
    for phase in phases:
        stripes = phase.batches.stripes()
        for group in phase.groups(start, max_tokens=_GROUP_TOKENS):
            for payload in phase.batches.payloads(group, 1, stripes, kinds=kinds):
                yield from decode(payload, phase.batches.manifest.token_dtype)


def _nothing(line: str) -> None:
    """Tells nobody; the sweep has told it once."""


def _refuse(line: str) -> None:
    raise UserError(line)


def _check_held_out(data: TrainingData) -> None:
    """Raises UserError where there is nothing to compare trials by."""
    for phase, batches in zip(data.phases, data.held_out, strict=True):
        if batches is None:
            raise UserError(
                f"{phase.batches.url}: has no held-out data, which trials are compared by; prepare "
                "with data.prepare.held_out, or give evaluation.path"
            )


def _origin(run: Storage, origin: tuple[Storage, str] | None) -> tuple[Storage, Commit | None]:
    """Where the state to continue from lies, and which it is; None: a new run.

    A checkpoint of another run that is not there any more gives way to that run's newest one.
    """
    if origin is None:
        newest = newest_state(run, None, lambda _: None)
        named = [c for c in commits(run.sub("checkpoints")) if c.folder == newest.commit]
        return run.sub("checkpoints"), named[0] if named else None
    other, folder = origin
    there = commits(other.sub("checkpoints"))
    named = [commit for commit in there if commit.folder == folder]
    return other.sub("checkpoints"), (named or there)[0]
