"""The driver of a sweep: what it runs, notes in the journal and records in MLflow."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Literal

from ray import tune
from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial

from elastrata.checkpoints.commit import commits
from elastrata.driver.interrupt import Interrupt, undisturbed
from elastrata.recipe.recipe import Recipe, WorkersConfig
from elastrata.run import history
from elastrata.run.claim import SWEEP_FILE, is_copy
from elastrata.run.consistency import note_removal
from elastrata.run.export import export_model, loadable
from elastrata.run.facts import data_params, recipe_params, start_tags
from elastrata.run.history import HistoryWriter
from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import (
    CONCLUDED,
    COPIED,
    LAUNCHED,
    REPORTED,
    SUGGESTED,
    Report,
    Standings,
    State,
    Trial,
    report_entry,
)
from elastrata.sweeps.plots import publish
from elastrata.sweeps.result import BASE_FILE, JOURNAL, read_journal, sweep_digest
from elastrata.sweeps.scheduler import PbtConfig, build_scheduler
from elastrata.sweeps.search import build_searcher
from elastrata.sweeps.space import Value
from elastrata.sweeps.suggestions import Suggestions
from elastrata.sweeps.trial import REPORT, Past, TrialActor
from elastrata.sweeps.trial_recipe import TrialJob
from elastrata.tracking.models import LoadableModel
from elastrata.tracking.tracker import Status, Tracker, open_tracker
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_CPUS_OF_A_GROUP = 0.001
"""The claim of the process beside a group of workers, as Tune wants one from it; the workers
have their own."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Equal shares of a cluster."""

    count: int
    """Trials at a time."""
    cpus: float
    """Logical CPUs that the process of a trial claims."""
    gpus: float
    threads: int
    """CPU threads of a worker."""


def slots(
    workers: WorkersConfig,
    resources: Mapping[str, float],
    wanted: int | Literal["auto"],
    *,
    trials: int,
) -> Slots:
    """Shares out a cluster so that trials do not fight over it.

    Args:
        workers: of a trial.
        resources: of the cluster, by Ray's names.
        wanted: trials at a time.
        trials: there are no more.

    Raises:
        UserError: the cluster is too small for a single one, or for as many groups as are wanted.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    gpus_each = workers.gpus_each(gpus)
    of_one = {"CPU": workers.most * workers.cpus, "GPU": workers.most * gpus_each}
    if workers.most == 1 and not gpus_each:
        of_one["CPU"] = min(1.0, cpus)
    claimed = {**of_one, "CPU": of_one["CPU"] + _CPUS_OF_A_GROUP * (workers.most > 1)}
    fitting = min(
        (int(resources.get(kind, 0.0) / each + 1e-9) for kind, each in claimed.items() if each),
        default=0,
    )
    if fitting < 1:
        needs = " and ".join(f"{amount:g} {kind}s" for kind, amount in of_one.items() if amount)
        raise UserError(
            f"workers.max: {workers.most}: a trial needs {needs}, the cluster has {cpus:g} CPUs "
            f"and {gpus:g} GPUs"
        )
    if workers.most > 1 and wanted != "auto" and min(trials, wanted) > fitting:
        raise UserError(
            f"concurrency: {wanted}: the cluster has room for {fitting} trials of {workers.most} "
            "workers at a time"
        )
    if not gpus_each and wanted == "auto":
        fitting = max(1, min(fitting, int(cpus / workers.most)))  # a CPU for every worker
    count = min(trials, fitting if wanted == "auto" else wanted)
    share = cpus / count
    threads = max(1, int(share / workers.most))
    if workers.most > 1:
        return Slots(count=count, cpus=_CPUS_OF_A_GROUP, gpus=0.0, threads=threads)
    return Slots(
        count=count,
        cpus=min(share, of_one["CPU"]) if gpus_each else share,
        gpus=min(gpus_each, gpus / count),
        threads=threads,
    )


_STATUS: dict[State, Status] = {
    "finished": "FINISHED",
    "stopped": "FINISHED",
    "diverged": "FAILED",
    "failed": "FAILED",
}


class SweepRecord:
    """Passes on what happens. Its methods return at once and never raise.

    Args:
        whole: the open record of the sweep.
        folder: of the trials' runs.
    """

    def __init__(self, whole: Tracker, folder: Storage) -> None:
        self.whole = whole
        self._folder = folder
        self._parts: dict[str, Tracker] = {}

    def begin(self, trial: Trial, recipe: Recipe | None) -> None:
        """A trial begins, or is known from before: what a driver that died did not write of it is
        written now.

        Args:
            trial: with all that is known of it.
            recipe: its own; None where its values make none.
        """
        params = recipe_params(recipe.as_recorded().model_dump(mode="json")) if recipe else {}
        searched = {f"searched.{key}": value for key, value in trial.values.items()}
        part = self.whole.child(trial.id, params, {"trial": trial.id, **searched})
        self._parts[trial.id] = part
        part.log_steps(Past.of(self._folder.sub(trial.id)).curves())
        for report in trial.reports:
            part.log_steps([{"step": report.step, **report.metrics}])
        if trial.is_over:
            self.conclude(trial)

    def report(self, id: str, report: Report) -> None:
        """A report has come."""
        self._parts[id].log_steps(report.steps)
        if report.metrics:
            self._parts[id].log_steps([{"step": report.step, **report.metrics}])
        if report.copied:
            values = {f"searched.{key}": value for key, value in report.copied.values.items()}
            self._parts[id].tag({**values, "copied_from": report.copied.source})

    def conclude(self, trial: Trial) -> None:
        """A trial is over."""
        part = self._parts[trial.id]
        part.tag({"state": trial.state, **({"text": trial.text} if trial.text else {})})
        part.end(_STATUS[trial.state])

    def crown(
        self,
        trial: Trial,
        value: float,
        checkpoint: tuple[str, int] | None,
        model: str,
        export: LoadableModel | None,
    ) -> None:
        """Marks the best trial, and registers its state as a version of a model.

        Args:
            trial: the best one.
            value: its metric.
            checkpoint: its newest one, a URI and a step.
            model: the name of the registered model.
            export: what is made of that checkpoint; None: the checkpoint itself is registered.
        """
        values: Mapping[str, Any] = {f"best.{key}": v for key, v in trial.values.items()}
        self.whole.tag({"best_trial": trial.id, "best_value": value, **values})
        last = trial.last
        if last:
            self.whole.log_steps(
                [{"step": last.step, **{f"best/{k}": v for k, v in last.metrics.items()}}]
            )
        for id, part in self._parts.items():
            part.tag({"best": id == trial.id})
        if checkpoint:
            self.whole.tag({"best_checkpoint": checkpoint[0]})
            metrics = dict(last.metrics) if last else {}
            self._parts[trial.id].record_checkpoint(*checkpoint, metrics)
            if export:
                self._parts[trial.id].register_export(export, model)
            else:
                self._parts[trial.id].register_checkpoint(checkpoint[0], model)


TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Tune keeps no notes of its own, as the journal says all, and prints nothing."""
_GRACE_SECONDS = 60.0
Show = Callable[[Standings], None]


@dataclass(frozen=True, kw_only=True)
class SweepDriver:
    """One driver's part in a sweep."""

    config: SweepConfig
    folder: Storage
    job: TrialJob
    interrupt: Interrupt
    show: Show
    warn: Callable[[str], None]
    standings: Standings
    entries: list[dict[str, Any]]
    journal: HistoryWriter
    record: SweepRecord
    launch: int
    """1, then 2..."""
    lock: Lock
    cleaned: set[str]
    """Trials whose checkpoints were deleted."""

    @classmethod
    def begin(
        cls,
        config: SweepConfig,
        folder: Storage,
        job: TrialJob,
        interrupt: Interrupt,
        show: Show,
        warn: Callable[[str], None],
        resources: Mapping[str, float],
    ) -> SweepDriver:
        """Reads the journal and opens the record."""
        storage = folder.sub(JOURNAL)
        entries = read_journal(folder).entries
        recipe = job.base.recipe
        launches = [entry for entry in entries if entry["kind"] == LAUNCHED]

        def is_copied(original: str) -> bool:
            if found := is_copy(folder, original, _mlflow_run_id):
                warn(f"{folder.uri()}: a copy of {original}; it gets MLflow runs of its own")
            return found

        data = training_data(recipe)
        whole = open_tracker(
            recipe.tracking,
            Storage(recipe.storage),
            run_name=folder.url.rpartition("/")[2],
            run_id=launches[-1]["mlflow_run_id"] if launches else None,
            params={
                **recipe_params(config.model_dump(mode="json")),
                **data_params(dict(data.trained_on).values()),
            },
            tags=start_tags(data.train.manifest.fingerprint, folder.uri(), resources),
            inputs=data.inputs,
            is_copy=is_copied,
        )
        for name in (SWEEP_FILE, BASE_FILE):
            whole.log_artifact(name, folder.read(name))
        launch = history.next_attempt(storage)
        journal = HistoryWriter(storage, launch, warn)
        launched = {"mlflow_run_id": whole.run_id, "sweep_sha256": sweep_digest(folder)}
        journal.add(LAUNCHED, launched)
        journal.flush()
        standings = Standings(config.metric, config.mode, entries)
        record = SweepRecord(whole, job.folder)
        told = {trial.id: trial.last.step for trial in standings.trials.values() if trial.last}
        drive = cls(
            config=config,
            folder=folder,
            job=replace(job, told=told),
            interrupt=interrupt,
            show=show,
            warn=warn,
            standings=standings,
            entries=entries,
            journal=journal,
            record=record,
            launch=launch,
            lock=Lock(),
            cleaned=set(),
        )
        for trial in standings.trials.values():
            record.begin(trial, drive.recipe_of(trial.id, trial.values))
        return drive

    def to_end(self, shares: Slots, trials: int, tokens: int, began: float) -> Status:
        """Runs what is left, and makes the report, whatever came."""
        status: Status = "FAILED"
        scratch = TemporaryDirectory()  # what is in it must stay until the record is closed
        try:
            with self.interrupt.heard(
                lambda name: self.warn(f"{name}: ending with the best so far")
            ):
                self.interrupt.run(
                    lambda: self._tune(shares, trials, tokens, began),
                    _GRACE_SECONDS,
                    lambda name: None,
                )
            over = all(trial.is_over for trial in self.standings.trials.values())
            status = "FINISHED" if over and not self.interrupt.signal else "KILLED"
            self._crown(Path(scratch.name))
            self._clean(at_the_end=status == "FINISHED")
            self._publish()
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            with undisturbed("closing the sweep's record"):
                self.journal.flush()
                self.record.whole.finish(status)
                scratch.cleanup()
        return status

    def note(self, entry: dict[str, Any]) -> None:
        """Something has happened: it is in the journal before anything follows from it."""
        kind = entry["kind"]
        with self.lock:
            self.journal.add(kind, {key: value for key, value in entry.items() if key != "kind"})
            self.journal.flush()
            self.standings.apply(entry)
        if kind == SUGGESTED:
            trial = self.standings.trials[entry["trial"]]
            self.record.begin(trial, self.recipe_of(trial.id, trial.values))
        elif kind == CONCLUDED:
            self.record.conclude(self.standings.trials[entry["trial"]])
            self._clean(but=entry["trial"])
        self.show(self.standings)

    def recipe_of(self, id: str, values: Mapping[str, Value]) -> Recipe | None:
        """The recipe of a trial; None where its values make none."""
        try:
            return self.job.recipe(id, values)
        except UserError:
            return None

    def _tune(self, shares: Slots, trials: int, tokens: int, began: float) -> None:
        config = self.config
        common = {"metric": config.metric, "mode": config.mode}
        scheduler = build_scheduler(config.scheduler, config.space, **common, trial_tokens=tokens)
        is_pbt = isinstance(config.scheduler, PbtConfig)
        at_a_time = trials if is_pbt else shares.count
        suggestions = Suggestions(
            build_searcher(config.searcher, config.space, **common),
            scheduler,
            self.standings,
            self.entries,
            trials=trials,
            at_a_time=at_a_time,
            problem=self._problem,
            note=self.note,
        )
        os.environ.update(TUNE_SETTINGS, TUNE_MAX_PENDING_TRIALS_PG=str(at_a_time))
        trainable = tune.with_parameters(TrialActor, job=self.job)
        bundle = {"CPU": shares.cpus, **({"GPU": shares.gpus} if shares.gpus else {})}
        end = began + config.max_seconds if config.max_seconds else math.inf
        # What goes wrong is in the journal; Tune would tell it in pages.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        tune.run(
            tune.with_resources(trainable, tune.PlacementGroupFactory([bundle])),
            name=f"launch-{self.launch:04d}",
            storage_path=self.folder.uri("ray"),
            num_samples=trials,
            search_alg=suggestions,
            scheduler=suggestions.scheduler,
            trial_name_creator=suggestions.names,
            trial_dirname_creator=suggestions.names,
            stop=_Stop(lambda: self.interrupt.signal is not None or time.monotonic() > end),
            callbacks=[Watch(self.standings, self.note, self.record.report, self.warn)],
            max_failures=config.max_failures,
            reuse_actors=True,
            raise_on_failed_trial=False,
            verbose=0,
        )
        self.folder.sub("ray").delete()

    def _problem(self, id: str, values: Mapping[str, Value]) -> str | None:
        try:
            self.job.recipe(id, values)
        except UserError as error:
            return "; ".join(error.problems)
        return None

    def _crown(self, scratch: Path) -> None:
        best = self.standings.best()
        if best is None:
            return
        checkpoints = self.job.folder.sub(best.id, "checkpoints")
        saved = commits(checkpoints)
        newest = (checkpoints.uri(saved[0].folder), saved[0].step) if saved else None
        name = self.folder.url.rpartition("/")[2]
        export = self._exported(best.id, scratch) if newest else None
        self.record.crown(best, best.value(self.config.metric), newest, name, export)

    def _exported(self, trial: str, scratch: Path) -> LoadableModel | None:
        """The newest state of a trial as MLflow loads it; None where that cannot be."""
        try:
            model = export_model(self.job.folder.uri(trial), scratch / "model")
            return loadable(model, scratch / "mlmodel")
        except Exception as error:  # the checkpoint is there all the same
            self.warn(f"the best trial's model is in MLflow as a checkpoint only: {error}")
            return None

    def _clean(self, *, but: str = "", at_the_end: bool = False) -> None:
        """Deletes the checkpoints of trials that are over and not the best."""
        if self.config.keep == "all" or (
            isinstance(self.config.scheduler, PbtConfig) and not at_the_end
        ):
            return
        best = self.standings.best()
        for trial in self.standings.trials.values():
            is_cleaned = trial.id in self.cleaned and not at_the_end
            if trial.is_over and trial is not best and trial.id != but and not is_cleaned:
                run = self.job.folder.sub(trial.id)
                if note_removal(run, self.warn):
                    run.delete("checkpoints")
                    self.cleaned.add(trial.id)

    def _publish(self) -> None:
        try:
            publish(self.folder, self.standings, self.config, self.record.whole, self.warn)
        except Exception as error:  # pictures do not undo a sweep
            self.warn(f"no report of the sweep: {error}")


def _mlflow_run_id(folder: Storage) -> str | None:
    launches = [entry for entry in read_journal(folder).entries if entry["kind"] == LAUNCHED]
    return launches[-1]["mlflow_run_id"] if launches else None


class _Stop(tune.Stopper):
    """Ends all trials when it is time."""

    def __init__(self, is_time: Callable[[], bool]) -> None:
        self._is_time = is_time

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes it down for a resumption that is never asked for

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._is_time()


class Watch(Callback):
    """Called by Tune in the driver, one event after the other: there is one writer.

    Args:
        standings: of the sweep.
        note: takes an entry of the journal.
        told: called with a trial's id and its report, also with one that is not news.
        warn: called with one line about what did not go well and goes on.
    """

    def __init__(
        self,
        standings: Standings,
        note: Callable[[dict[str, Any]], None],
        told: Callable[[str, Report], None],
        warn: Callable[[str], None],
    ) -> None:
        self._standings, self._note, self._told, self._warn = standings, note, told, warn

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: Any, **info: Any
    ) -> None:
        """A report has come, and the scheduler has decided."""
        report: Report = result.pop(REPORT)
        known = self._standings.trials[str(trial)]
        self._told(str(trial), report)
        if report.copied:
            self._note({"kind": COPIED, "trial": str(trial), **asdict(report.copied)})
        is_news = not known.last or report.step > known.last.step or report.copied is not None
        if report.metrics and is_news:
            self._note({"kind": REPORTED, **report_entry(str(trial), report)})
        if result.get("done"):
            state = "stopped" if report.state == "running" else report.state
            self._conclude(str(trial), state, report.text)

    def on_trial_recover(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """The process of a trial died; another one goes on."""
        self._warn(f"trial {trial!s}: its process died; going on from its checkpoint")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """The process of a trial died too often."""
        self._conclude(str(trial), "failed", f"its process died{_reason(trial)}")

    def _conclude(self, id: str, state: str, text: str) -> None:
        if not self._standings.trials[id].is_over:
            self._note({"kind": CONCLUDED, "trial": id, "state": state, "text": text})


def _reason(trial: TuneTrial) -> str:
    error = trial.get_error()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] if error else []
    return f": {lines[-1][:200]}" if lines else ""
