"""Trials of a sweep: each is a run on one worker in this process, or on a group of workers."""

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

from elastrata.checkpoints.commit import Commit, list_commits
from elastrata.cluster.node_speeds import kinds_by_node
from elastrata.device.capabilities import current_device
from elastrata.driver.interrupt import Interrupt
from elastrata.driver.launch import train
from elastrata.parallel.mesh import data_rank, lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.entries import metrics_of, step_record
from elastrata.run.folder import RunIdentity, read_identity, write_identity
from elastrata.run.history import prepare_attempt, restore_history
from elastrata.step.evaluate import evaluation_event
from elastrata.step.events import Action, Committed, ControlSignal, Evaluated, Event, Started
from elastrata.step.records import StepRecord, Stopwatch
from elastrata.step.target import is_over
from elastrata.sweeps.journal import (
    LAUNCHED,
    Report,
    StateCopy,
    classify_error,
)
from elastrata.sweeps.scheduler import TOKENS
from elastrata.sweeps.trial_recipe import TrialJob
from elastrata.tracking.tracker import SilentTracker
from elastrata.trainer.checkpoint_manager import CheckpointManager
from elastrata.trainer.evaluation import HeldOutData
from elastrata.trainer.initial_weights import find_parent, keep_rows
from elastrata.trainer.preflight import TrainingData, find_training_data
from elastrata.trainer.reporter import Reporter
from elastrata.trainer.resume import find_resume_point, start_after
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKinds
from elastrata_pipelines.storage import Storage

CURVES = ("train/loss", "train/lr", "train/gradient_norm", "progress/tokens")
"""Metrics that are reported for every step; the run's history holds all of them."""


@dataclass(frozen=True)
class RunPast:
    """Effective entries of a run's history: those that no later attempt rolled back."""

    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @classmethod
    def of(
        cls, run: Storage, warn: Callable[[str], None] = lambda line: None, step: int | None = None
    ) -> Self:
        """Read a run's history up to a step; it is empty if the run does not exist.

        Entries that the newest checkpoint carries and the history lacks, because their writer died,
        are written to the history first.

        Args:
            run: the run's folder.
            warn: called with a line for each damaged part of the history. By default such lines are
                dropped, for callers whose user reads them elsewhere.
            step: the last step to include. Default: all steps.
        """
        for commit in list_commits(run.sub("checkpoints"))[:1]:
            restore_history(run.sub("history"), commit)
        stored = history.read_history(run.sub("history"))
        for line in stored.problems:
            warn(line)
        entries = stored.entries
        if any(entry["kind"] == LAUNCHED for entry in entries):
            warn(f"{run.uri('history')}: not the history of a run, but the journal of a sweep")
        effective = history.effective_steps(entries), history.surviving_evaluations(entries)
        return cls(*([e for e in part if step is None or e["step"] <= step] for part in effective))

    def unreported(self) -> tuple[list[Mapping[str, float]], float]:
        """Return the metrics of the steps after the last evaluation, and their seconds."""
        last = max((entry["step"] for entry in self.evaluations), default=0)
        later = [entry for entry in self.steps if entry["step"] > last]
        return [_curve(entry) for entry in later], sum(entry["seconds"] for entry in later)

    def curves(self) -> list[Mapping[str, float]]:
        """Return the metrics of every step."""
        return [_curve(entry) for entry in self.steps]

    def reports(self) -> Iterator[Report]:
        """Yield a report for every evaluation, each with the steps since the one before."""
        by_step = {entry["step"]: entry for entry in self.steps}
        last_step = 0
        for entry in self.evaluations:
            # Damaged entries are skipped here, as `of` has already warned about them.
            if entry["step"] <= last_step or entry["step"] not in by_step:
                continue
            entry_steps = [
                by_step[step] for step in range(last_step + 1, entry["step"] + 1) if step in by_step
            ]
            yield Report(
                step=entry["step"],
                samples=entry_steps[-1]["samples"],
                tokens=entry_steps[-1]["tokens"],
                seconds=sum(step["seconds"] for step in entry_steps),
                metrics=metrics_of(entry),
                steps=tuple(map(_curve, entry_steps)),
            )
            last_step = entry["step"]


def step_metrics(record: StepRecord) -> Mapping[str, float]:
    """Return the metrics of a step that are reported to the sweep, with its number."""
    metrics = record.to_metrics()
    return {"step": record.step, **{name: metrics[name] for name in CURVES}}


def _curve(entry: Mapping[str, Any]) -> Mapping[str, float]:
    return step_metrics(step_record(entry, "the trial's history"))


# Tokens that are read and dealt together. The group is small because a trial may stop early, which
# wastes the rest of it.
_GROUP_TOKENS = 2**20
_SECONDS_TO_SAVE = 600.0


class LoneChannel:
    """In-process event channel that records which checkpoints are complete."""

    def __init__(self) -> None:
        self._folders: dict[int, str] = {}
        self._changed = Condition()

    def send(self, event: Event) -> None:
        """Record the folder of a committed checkpoint; ignore other events."""
        if isinstance(event, Committed):
            with self._changed:
                self._folders[event.step] = event.uri.rpartition("/")[2]
                self._changed.notify_all()

    def look(self) -> ControlSignal | None:
        """Return None: no driver sends control signals to a lone trial."""
        return None

    def flush(self) -> None:
        """Do nothing: events are handled as they are sent."""

    def wait_for_commit(self, step: int, seconds: float) -> str:
        """Wait for the checkpoint of a step and return the name of its folder.

        Raises:
            TimeoutError: the checkpoint is not complete within `seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: step in self._folders, seconds):
                raise TimeoutError(f"the checkpoint of step {step} was not saved")
            return self._folders[step]


class LoneTrial:
    """Run on one worker in the calling process, which trains only while a report is requested.

    The calling process must have initialised a process group for itself alone, see `lone_group`.

    Args:
        recipe: the recipe to train.
        run: the run's folder; an existing run continues from its newest checkpoint.
        origin: the folder of another run and a checkpoint in it to continue from instead.
        told: the last step whose evaluation the sweep has already received; later evaluations in
            the run's history are reported first.
        kinds: the kind of the run's only rank, if its memory limits the tokens of a micro-batch;
            else empty.

    Raises:
        UserError: the data or the checkpoints cannot be used.
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
        # PyTorch uses all cores by default, and other trials share the machine.
        torch.set_num_threads(recipe.workers.threads or 1)
        self.recipe, self.run = recipe, run
        identity = read_identity(run)
        fork_origin = identity.origin if identity else None
        data = find_training_data(recipe, fork_origin)
        _check_held_out(data)
        self._phases = data.phases
        parent = find_parent(run, recipe, data, _ignore_warning)
        if parent:
            recipe = self.recipe = keep_rows(recipe, data, parent.num_ids)
        self._trainer = Trainer(
            recipe,
            data.phases,
            current_device(),
            world_size=1,
            # Up to one trial per CPU runs on a node at a time.
            per_node=os.cpu_count() or 1,
            kinds=kinds,
        )
        checkpoints, self._commit = _find_start(run, origin)
        if self._commit:
            self._trainer.restore(checkpoints, self._commit)
        else:
            self._trainer.begin(parent)
        self.start = start_after(self._commit)
        self._held_out = HeldOutData(
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
        new_identity = RunIdentity(
            name=name,
            data=data.data_sets,
            parent=parent,
            origin=fork_origin,
            mixtures=data.mixtures,
        )
        write_identity(run, new_identity, recipe)
        # Another run's commit holds no entries of this run's history.
        number = prepare_attempt(run, self._commit if origin is None else None)
        # After a copy of another trial's state, this run's earlier reports no longer describe it.
        self._past = (
            RunPast.of(run, _raise_error, self.start.step) if origin is None else RunPast([], [])
        )
        self._reported_step = told
        self._reports = self._train(number)

    def report(self) -> Report:
        """Train up to the next evaluation and report it.

        Raises:
            TrainingError: the loss is not finite.
            StopIteration: the last step has already been reported.
        """
        return next(self._reports)

    def evaluation(self) -> Mapping[str, float]:
        """Evaluate the current model without adding to the run's history."""
        step = self.start.step
        losses, seconds = self._trainer.evaluate(self._held_out.of(step))
        return evaluation_event(step, losses, seconds).to_metrics()

    def save(self) -> str:
        """Save the state of the step that was reported last and wait until it is committed.

        Returns:
            The name of the checkpoint's folder.

        Raises:
            TimeoutError: storage does not complete the checkpoint within 600 s.
        """
        # Without a step in this process the state is still that of the checkpoint it came from.
        if self._record is None:
            assert self._commit is not None
            return self._commit.folder
        self._manager.save(self._record, Action.SAVE, is_last=True)
        return self._channel.wait_for_commit(self._record.step, _SECONDS_TO_SAVE)

    def close(self) -> None:
        """Stop the run without saving; steps since the last checkpoint are lost."""
        self._reports.close()

    def _train(self, number: int) -> Generator[Report]:
        stopwatch = Stopwatch()
        self._reporter = Reporter(self.run, self._channel, attempt=number, rank=0)
        self._manager = CheckpointManager(
            self.run,
            None,
            self._reporter,
            attempt=number,
            config=self.recipe.checkpoint,
            state=self._trainer.state,
            extra=self._trainer.extra,
            on_gpu=current_device().type == "cuda",
        )
        with self._manager as manager:
            self._reporter.on_start(
                Started(
                    attempt=number,
                    world_size=1,
                    step=self.start.step,
                    state="durable" if self._commit else "new",
                    pids={},
                    seconds=stopwatch.seconds,
                )
            )
            # The error is raised after the block: the manager closes its savers only if the block
            # ends without one.
            training_error: Exception | None = None
            try:
                yield from self._yield_reports(manager)
            except GeneratorExit:
                manager.leave()
            except Exception as error:
                manager.leave()
                training_error = error
        if training_error:
            raise training_error

    def _yield_reports(self, manager: CheckpointManager) -> Iterator[Report]:
        """Yield the unreported evaluations of the history, then those of the steps that follow."""
        is_finished = False
        for report in self._past.reports():
            is_finished = self._is_end(report.step, report.metrics)
            if report.step > self._reported_step or is_finished:
                yield replace(report, state="finished" if is_finished else "running")
        if not is_finished:
            yield from self._train_steps(manager)

    def _train_steps(self, manager: CheckpointManager) -> Iterator[Report]:
        steps, seconds = self._past.unreported()
        for step in self._trainer.train(
            read_steps(self._phases, self.start, self._kinds),
            self.start,
            held_out=self._held_out,
            checkpoints=manager,
            reporter=self._reporter,
            target=self.recipe.target,
        ):
            self._record = record = step.record
            steps.append(step_metrics(record))
            seconds += record.seconds + step.evaluation_seconds
            if step.is_last:
                # The driver may read the last checkpoint as soon as it receives the last report.
                self._channel.wait_for_commit(record.step, _SECONDS_TO_SAVE)
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


def read_steps(phases: Iterable[Phase], start: Start, kinds: RankKinds = ()) -> Iterator[RankStep]:
    """Read and decode the remaining steps of a run in this process, with all rows of each."""
    for phase in phases:
        stripes = phase.batches.stripes()
        for group in phase.groups(start, max_tokens=_GROUP_TOKENS):
            for payload in phase.batches.payloads(group, 1, stripes, kinds=kinds):
                yield from decode(payload, phase.batches.manifest.token_dtype)


def _ignore_warning(line: str) -> None:
    """Ignore a line: the sweep's launch has already shown it."""


def _raise_error(line: str) -> None:
    raise UserError(line)


def _check_held_out(data: TrainingData) -> None:
    """Check that every phase has held-out data, by which trials are compared.

    Raises:
        UserError: a phase has none.
    """
    for phase, batches in zip(data.phases, data.held_out, strict=True):
        if batches is None:
            raise UserError(
                f"{phase.batches.url}: has no held-out data, which is needed to compare trials; "
                "prepare with data.prepare.held_out, or give evaluation.path"
            )


def _find_start(run: Storage, origin: tuple[Storage, str] | None) -> tuple[Storage, Commit | None]:
    """Return the checkpoint folder and the commit to continue from; the commit is None for a new
    run.

    If the named checkpoint of another run no longer exists, that run's newest one is used.
    """
    if origin is None:
        newest = find_resume_point(run, None, lambda _: None)
        matching_commits = [
            c for c in list_commits(run.sub("checkpoints")) if c.folder == newest.commit
        ]
        return run.sub("checkpoints"), matching_commits[0] if matching_commits else None
    other, folder = origin
    saved_commits = list_commits(other.sub("checkpoints"))
    # The other trial keeps saving, and may have deleted this checkpoint by now.
    matching_commits = [commit for commit in saved_commits if commit.folder == folder]
    return other.sub("checkpoints"), (matching_commits or saved_commits)[0]


class GroupTrial:
    """Run of a group of workers on Ray Train, driven by a thread of this process.

    The calling process itself claims almost none of the cluster's CPUs; its workers claim theirs.

    Args:
        recipe: the recipe to train; its storage holds the run.
        name: the run's name.
        told: the last step whose evaluation the sweep has already received; later evaluations in
            the run's history are reported first.
    """

    def __init__(self, recipe: Recipe, name: str, told: int = 0) -> None:
        self._recipe, self._name = recipe, name
        past = RunPast.of(Storage(recipe.storage).sub(name)).reports()
        # The last report is kept even if the sweep has received it: a run without remaining steps
        # has no other one to return.
        self._past = [r for r in past if r.step > told or self._is_end(r.step, r.metrics)]
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._interrupt = Interrupt()
        self._raised: Exception | None = None
        self._newest: StepRecord | None = None
        # A daemon thread does not keep the process alive when Tune stops it.
        self._thread = Thread(target=self._train_in_thread, name="elastrata-trial", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """Wait for the next evaluation and report it.

        Raises:
            Exception: the error that ended the run.
        """
        if self._past and not self._is_end(self._past[0].step, self._past[0].metrics):
            return self._past.pop(0)
        steps: list[Mapping[str, float]] = []
        seconds = 0.0
        while event := self._events.get():
            if isinstance(event, StepRecord):
                steps.append(step_metrics(event))
                seconds += event.seconds
                self._newest = event
            elif isinstance(event, Evaluated) and self._newest:
                metrics = event.to_metrics()
                is_last = self._is_end(event.step, metrics)
                if is_last:
                    self._join_thread()
                return Report(
                    step=event.step,
                    samples=self._newest.samples,
                    tokens=self._newest.tokens,
                    seconds=seconds + event.seconds,
                    metrics=metrics,
                    steps=tuple(steps),
                    state="finished" if is_last else "running",
                )
        self._join_thread()
        # The run had no steps left, so its last evaluation is in the history.
        return replace(self._past[-1], state="finished")

    def close(self) -> None:
        """Request a checkpoint and a stop, and wait until the run has ended."""
        self._interrupt.ask("the end of the trial")
        self._thread.join()

    def _is_end(self, step: int, metrics: Mapping[str, float]) -> bool:
        recipe = self._recipe
        return is_over(step, metrics, steps=recipe.steps_in_all, target=recipe.target)

    def _join_thread(self) -> None:
        self._thread.join()
        if self._raised:
            raise self._raised

    def _train_in_thread(self) -> None:
        try:
            train(
                self._recipe,
                name=self._name,
                show=self._events.put,
                interrupt=self._interrupt,
                # The sweep's driver records the trial in MLflow from its reports.
                record=SilentTracker(),
            )
        except KeyboardInterrupt:
            pass  # `close` has requested the stop
        except Exception as error:
            self._raised = error
        finally:
            self._events.put(None)


REPORT = "report"
"""The key of a result that holds the `Report`; schedulers and searchers read the other keys."""
_process = ExitStack()
"""Contexts that stay open until the process ends."""


class RunningTrial(Protocol):
    """Trial that has started, on one worker or on a group of workers."""

    def report(self) -> Report:
        """Train up to the next evaluation and report it."""
        ...

    def close(self) -> None:
        """Stop the run before its last step."""
        ...


class TrialActor(Trainable):
    """Trainable through which Ray Tune runs trials, one after the other in one process."""

    def setup(self, config: dict[str, Any], job: TrialJob) -> None:  # type: ignore[override]
        """Keep the job; the run itself is opened by the first step."""
        # Tune calls `load_checkpoint` after `setup`, and only then is the state to continue from
        # known.
        self._job = job
        self._trial: RunningTrial | None = None
        self._origin: tuple[Storage, str] | None = None
        self._copied: StateCopy | None = None
        self._newest: Report | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Close the current trial so that this process can run another one."""
        self.cleanup()
        return True

    def step(self) -> dict[str, Any]:
        """Train up to the next evaluation; an error becomes the trial's last report."""
        try:
            self._trial = self._trial or self._open()
            report = replace(self._trial.report(), copied=self._copied)
        except Exception as error:
            # Tune would restart the trial if the error left this method, and a diverged one would
            # diverge again.
            state, text = classify_error(error)
            latest = self._newest or Report(step=0, samples=0, tokens=0, seconds=0.0, metrics={})
            report = replace(latest, seconds=0.0, metrics={}, steps=(), state=state, text=text)
        self._newest, self._copied = report, None
        return {
            # Schedulers and searchers read the metric of every result, and a failed trial has none.
            self._job.metric: math.nan,
            **report.metrics,
            TOKENS: report.tokens,
            "done": report.state != "running",
            REPORT: report,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, str]:
        """Save the trial's state in its run and return the location for Tune."""
        trial = self._trial
        # Only population based training saves trials, and it requires one worker per trial.
        assert isinstance(trial, LoneTrial)
        return {"run": trial.run.uri(), "folder": trial.save()}

    def load_checkpoint(self, checkpoint: dict[str, str] | None) -> None:
        """Set the state to continue from, if it is a checkpoint of another trial."""
        assert checkpoint is not None
        run = Storage(checkpoint["run"])
        # A trial's own run continues from its newest checkpoint without being named.
        if run.uri() != self._run_folder().uri():
            self._origin = (run, checkpoint["folder"])

    def cleanup(self) -> None:
        """Stop the current trial, if there is one."""
        trial, self._trial = self._trial, None
        self._origin = self._copied = self._newest = None
        if trial:
            trial.close()

    def _run_folder(self) -> Storage:
        return self._job.folder.sub(self.trial_name)

    def _open(self) -> RunningTrial:
        recipe = self._job.recipe(self.trial_name, self.config)
        reported_step = self._job.told.get(self.trial_name, 0)
        if recipe.workers.most > 1:
            return GroupTrial(recipe, self.trial_name, reported_step)
        if not dist.is_initialized():
            # The process group is shared by all trials that this process runs.
            _process.enter_context(lone_group(current_device()))
        node: str = ray.get_runtime_context().get_node_id()
        kinds = kinds_by_node(recipe)([node])
        trial = LoneTrial(recipe, self._run_folder(), self._origin, reported_step, kinds)
        if self._origin:
            self._copied = StateCopy(
                source=self._origin[0].url.rpartition("/")[2],
                step=trial.start.step,
                values=dict(self.config),
                metrics=trial.evaluation(),
            )
        return trial
