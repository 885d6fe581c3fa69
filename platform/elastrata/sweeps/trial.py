"""One trial of a sweep: a run on one worker in this process, or on a group of workers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Protocol, Self

import ray
import torch
import torch.distributed as dist
from ray.tune import Trainable

from elastrata.checkpoints.commit import Commit, commits
from elastrata.cluster.node_speeds import kinds_by_node
from elastrata.device.capabilities import current_device
from elastrata.driver.interrupt import Interrupt
from elastrata.driver.launch import train
from elastrata.parallel.mesh import data_rank, lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.entries import metrics_of, step_record
from elastrata.run.folder import RunIdentity, read_identity, write_identity
from elastrata.run.history import restore_history, take_over
from elastrata.step.evaluate import evaluated
from elastrata.step.events import Action, Committed, ControlSignal, Evaluated, Event, Started
from elastrata.step.records import StepRecord, Stopwatch
from elastrata.step.target import is_over
from elastrata.sweeps.journal import (
    LAUNCHED,
    Copied,
    Report,
    failure,
)
from elastrata.sweeps.scheduler import TOKENS
from elastrata.sweeps.trial_recipe import TrialJob
from elastrata.tracking.tracker import SilentTracker
from elastrata.trainer.attempt import attempt
from elastrata.trainer.checkpoint_manager import CheckpointManager
from elastrata.trainer.evaluation import HeldOut
from elastrata.trainer.initial_weights import find_parent
from elastrata.trainer.preflight import TrainingData, training_data
from elastrata.trainer.resume import newest_state, start_after
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKinds
from elastrata_pipelines.storage import Storage

CURVES = ("train/loss", "train/lr", "train/gradient_norm", "progress/tokens")
"""The metrics that are told of every step; the rest is in the run's history."""


@dataclass(frozen=True)
class Past:
    """Entries of a run's history that count."""

    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @classmethod
    def of(
        cls, run: Storage, warn: Callable[[str], None] = lambda line: None, step: int | None = None
    ) -> Self:
        """The past of a run, up to a step; empty where the run is not there.

        Lines that died with their writer and that its newest checkpoint has are written first.
        `warn` is called with a line for each part of the history that is not as it was written;
        default: it is, or will be, told elsewhere.
        """
        for commit in commits(run.sub("checkpoints"))[:1]:
            restore_history(run.sub("history"), commit)
        written = history.look(run.sub("history"))
        for line in written.problems:
            warn(line)
        entries = written.entries
        if any(entry["kind"] == LAUNCHED for entry in entries):
            warn(f"{run.uri('history')}: not the history of a run, but the journal of a sweep")
        counting = history.effective_steps(entries), history.surviving_evaluations(entries)
        return cls(*([e for e in part if step is None or e["step"] <= step] for part in counting))

    def unreported(self) -> list[Mapping[str, float]]:
        """Metrics of the steps after the last evaluation."""
        last = max((entry["step"] for entry in self.evaluations), default=0)
        return [_curve(entry) for entry in self.steps if entry["step"] > last]

    def curves(self) -> list[Mapping[str, float]]:
        """Metrics of every step."""
        return [_curve(entry) for entry in self.steps]

    def reports(self) -> Iterator[Report]:
        """A report for every evaluation, each with the steps before it."""
        by_step = {entry["step"]: entry for entry in self.steps}
        before = 0
        for entry in self.evaluations:
            if entry["step"] <= before or entry["step"] not in by_step:  # damaged, as was told
                continue
            own = [
                by_step[step] for step in range(before + 1, entry["step"] + 1) if step in by_step
            ]
            yield Report(
                step=entry["step"],
                samples=own[-1]["samples"],
                tokens=own[-1]["tokens"],
                seconds=sum(step["seconds"] for step in own),
                metrics=metrics_of(entry),
                steps=tuple(map(_curve, own)),
            )
            before = entry["step"]


def curve(record: StepRecord) -> Mapping[str, float]:
    """The metrics that are told of a step."""
    metrics = record.to_metrics()
    return {"step": record.step, **{name: metrics[name] for name in CURVES}}


def _curve(entry: Mapping[str, Any]) -> Mapping[str, float]:
    return curve(step_record(entry, "the trial's history"))


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


class GroupTrial:
    """A run on Ray Train, in a thread of this process. It takes no part in the cluster's CPUs.

    Args:
        recipe: what to train; its storage holds the run.
        name: of the run.
        told: evaluations up to this step were reported before; later ones that the run already has
            are reported first.
    """

    def __init__(self, recipe: Recipe, name: str, told: int = 0) -> None:
        self._recipe, self._name = recipe, name
        past = Past.of(Storage(recipe.storage).sub(name)).reports()
        self._past = [r for r in past if r.step > told or self._is_end(r.step, r.metrics)]
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._interrupt = Interrupt()
        self._raised: Exception | None = None
        self._newest: StepRecord | None = None
        self._thread = Thread(target=self._run, name="elastrata-trial", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """Waits for the next evaluation.

        Raises:
            Exception: what ended the run.
        """
        if self._past and not self._is_end(self._past[0].step, self._past[0].metrics):
            return self._past.pop(0)
        steps: list[Mapping[str, float]] = []
        seconds = 0.0
        while event := self._events.get():
            if isinstance(event, StepRecord):
                steps.append(curve(event))
                seconds += event.seconds
                self._newest = event
            elif isinstance(event, Evaluated) and self._newest:
                metrics = event.to_metrics()
                is_last = self._is_end(event.step, metrics)
                if is_last:
                    self._end()
                return Report(
                    step=event.step,
                    samples=self._newest.samples,
                    tokens=self._newest.tokens,
                    seconds=seconds + event.seconds,
                    metrics=metrics,
                    steps=tuple(steps),
                    state="finished" if is_last else "running",
                )
        self._end()  # nothing was left to do, but for the last report
        return replace(self._past[-1], state="finished")

    def close(self) -> None:
        """Saves, and ends it where it is."""
        self._interrupt.ask("the end of the trial")
        self._thread.join()

    def _is_end(self, step: int, metrics: Mapping[str, float]) -> bool:
        recipe = self._recipe
        return is_over(step, metrics, steps=recipe.steps_in_all, target=recipe.target)

    def _end(self) -> None:
        self._thread.join()
        if self._raised:
            raise self._raised

    def _run(self) -> None:
        try:
            train(
                self._recipe,
                name=self._name,
                show=self._events.put,
                interrupt=self._interrupt,
                record=SilentTracker(),
            )
        except KeyboardInterrupt:
            pass  # it was asked to end
        except Exception as error:
            self._raised = error
        finally:
            self._events.put(None)


REPORT = "report"
"""The key of a result that holds the `Report`; the others are for searchers and schedulers."""
_process = ExitStack()
"""Contexts that last as long as the process."""


class RunningTrial(Protocol):
    """A trial that is under way: of one worker, or of a group."""

    def report(self) -> Report:
        """Trains up to the next evaluation."""
        ...

    def close(self) -> None:
        """Ends it where it is."""
        ...


class TrialActor(Trainable):
    """Tune's side of a trial."""

    def setup(self, config: dict[str, Any], job: TrialJob) -> None:  # type: ignore[override]
        """A trial begins with its first step, when it is known where it continues from."""
        self._job = job
        self._trial: RunningTrial | None = None
        self._origin: tuple[Storage, str] | None = None
        self._copied: Copied | None = None
        self._newest: Report | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial, in the same process."""
        self.cleanup()
        return True

    def step(self) -> dict[str, Any]:
        """Trains up to the next evaluation; what goes wrong is the trial's result."""
        try:
            self._trial = self._trial or self._open()
            report = replace(self._trial.report(), copied=self._copied)
        except Exception as error:
            state, text = failure(error)
            before = self._newest or Report(step=0, samples=0, tokens=0, seconds=0.0, metrics={})
            report = replace(before, seconds=0.0, metrics={}, steps=(), state=state, text=text)
        self._newest, self._copied = report, None
        return {
            self._job.metric: math.nan,
            **report.metrics,
            TOKENS: report.tokens,
            "done": report.state != "running",
            REPORT: report,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, str]:
        """Saves the trial's state in its run, and tells Tune where it is."""
        trial = self._trial
        assert isinstance(trial, LoneTrial)
        return {"run": trial.run.uri(), "folder": trial.save()}

    def load_checkpoint(self, checkpoint: dict[str, str] | None) -> None:
        """The trial is to continue from that state, maybe that of another one."""
        assert checkpoint is not None
        run = Storage(checkpoint["run"])
        if run.uri() != self._run().uri():
            self._origin = (run, checkpoint["folder"])

    def cleanup(self) -> None:
        """Ends the trial where it is."""
        trial, self._trial = self._trial, None
        self._origin = self._copied = self._newest = None
        if trial:
            trial.close()

    def _run(self) -> Storage:
        return self._job.folder.sub(self.trial_name)

    def _open(self) -> RunningTrial:
        recipe = self._job.recipe(self.trial_name, self.config)
        told = self._job.told.get(self.trial_name, 0)
        if recipe.workers.most > 1:
            return GroupTrial(recipe, self.trial_name, told)
        if not dist.is_initialized():
            _process.enter_context(lone_group(current_device()))
        node: str = ray.get_runtime_context().get_node_id()
        kinds = kinds_by_node(recipe)([node])
        trial = LoneTrial(recipe, self._run(), self._origin, told, kinds)
        if self._origin:
            self._copied = Copied(
                source=self._origin[0].url.rpartition("/")[2],
                step=trial.start.step,
                values=dict(self.config),
                metrics=trial.evaluation(),
            )
        return trial
