"""The driver of a sweep: it runs the trials, writes the journal and records the sweep in MLflow."""

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

from elastrata.checkpoints.commit import list_commits
from elastrata.driver.interrupt import Interrupt, shield_from_signals
from elastrata.recipe.recipe import Recipe, WorkersConfig
from elastrata.run import history
from elastrata.run.claim import SWEEP_FILE, is_copy
from elastrata.run.consistency import note_removal
from elastrata.run.export import export_model, to_loadable
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
from elastrata.sweeps.trial import REPORT, RunPast, TrialActor
from elastrata.sweeps.trial_recipe import TrialJob
from elastrata.tracking.models import LoadableModel
from elastrata.tracking.tracker import Status, Tracker, open_tracker
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.storage import Storage

# Tune requires the process of a trial to claim some resource. A trial on a group of workers claims
# this much; its workers claim their own CPUs and GPUs.
_CPUS_OF_A_GROUP = 0.001


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Equal shares of a cluster, one for each concurrent trial."""

    count: int
    """Number of concurrent trials."""
    cpus: float
    """Logical CPUs that the process of a trial claims."""
    gpus: float
    threads: int
    """CPU threads of each worker."""


def divide_cluster(
    workers: WorkersConfig,
    resources: Mapping[str, float],
    wanted: int | Literal["auto"],
    *,
    trials: int,
) -> Slots:
    """Divide a cluster into equal shares so that concurrent trials do not compete for CPUs and
    GPUs.

    Args:
        workers: the workers of a trial.
        resources: the cluster's resources, by Ray's names.
        wanted: number of concurrent trials.
        trials: number of trials in all, the upper limit of concurrent ones.

    Raises:
        UserError: the cluster is too small for one trial, or for the requested number of groups.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    gpus_each = workers.gpus_each(gpus)
    trial_needs = {"CPU": workers.most * workers.cpus, "GPU": workers.most * gpus_each}
    if workers.most == 1 and not gpus_each:
        # Without GPUs one CPU is enough to start; the share below is larger if there are more.
        trial_needs["CPU"] = min(1.0, cpus)
    trial_claims = {
        **trial_needs,
        "CPU": trial_needs["CPU"] + _CPUS_OF_A_GROUP * (workers.most > 1),
    }
    # 1e-9 as floats fall short of whole numbers: 0.3 / 0.1 is 2.9999999999999996.
    capacity = min(
        (
            int(resources.get(kind, 0.0) / each + 1e-9)
            for kind, each in trial_claims.items()
            if each
        ),
        default=0,
    )
    if capacity < 1:
        needs = " and ".join(
            f"{amount:g} {kind}s" for kind, amount in trial_needs.items() if amount
        )
        raise UserError(
            f"workers.max: {workers.most}: a trial needs {needs}, the cluster has {cpus:g} CPUs "
            f"and {gpus:g} GPUs"
        )
    # Groups claim whole workers and would wait for each other. Trials on one worker may share CPUs
    # and GPUs instead, as their claims shrink to fractions.
    if workers.most > 1 and wanted != "auto" and min(trials, wanted) > capacity:
        raise UserError(
            f"concurrency: {wanted}: the cluster has room for {pluralize(capacity, 'trial')} of "
            f"{workers.most} "
            "workers at a time"
        )
    if not gpus_each and wanted == "auto":
        # Every worker gets a whole CPU.
        capacity = max(1, min(capacity, int(cpus / workers.most)))
    count = min(trials, capacity if wanted == "auto" else wanted)
    share = cpus / count
    threads = max(1, int(share / workers.most))
    if workers.most > 1:
        return Slots(count=count, cpus=_CPUS_OF_A_GROUP, gpus=0.0, threads=threads)
    return Slots(
        count=count,
        cpus=min(share, trial_needs["CPU"]) if gpus_each else share,
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
    """MLflow record of a sweep, with a child run for every trial. Its methods return immediately
    and never raise.

    Args:
        whole: the open record of the sweep.
        folder: the folder of the trials' runs.
    """

    def __init__(self, whole: Tracker, folder: Storage) -> None:
        self.whole = whole
        self._folder = folder
        self._parts: dict[str, Tracker] = {}

    def begin(self, trial: Trial, recipe: Recipe | None) -> None:
        """Open the record of a new trial, or of one that an earlier launch began.

        Args:
            trial: the trial, with all of its reports so far.
            recipe: the trial's recipe; None if its values are invalid.
        """
        params = (
            recipe_params(recipe.without_preparation().model_dump(mode="json")) if recipe else {}
        )
        searched = {f"searched.{key}": value for key, value in trial.values.items()}
        part = self.whole.child(trial.id, params, {"trial": trial.id, **searched})
        self._parts[trial.id] = part
        # An earlier driver may have died before it recorded these steps.
        part.log_steps(RunPast.of(self._folder.sub(trial.id)).curves())
        for report in trial.reports:
            part.log_steps([{"step": report.step, **report.metrics}])
        if trial.is_over:
            self.conclude(trial)

    def report(self, id: str, report: Report) -> None:
        """Log the steps and metrics of a report, and tag a trial that copied another one's
        state."""
        self._parts[id].log_steps(report.steps)
        if report.metrics:
            self._parts[id].log_steps([{"step": report.step, **report.metrics}])
        if report.copied:
            values = {f"searched.{key}": value for key, value in report.copied.values.items()}
            self._parts[id].tag({**values, "copied_from": report.copied.source})

    def conclude(self, trial: Trial) -> None:
        """Tag a trial with its final state and close its record."""
        part = self._parts[trial.id]
        part.tag({"state": trial.state, **({"text": trial.text} if trial.text else {})})
        part.end(_STATUS[trial.state])

    def mark_best(
        self,
        trial: Trial,
        value: float,
        checkpoint: tuple[str, int] | None,
        model: str,
        export: LoadableModel | None,
    ) -> None:
        """Mark the best trial, and register its state as a version of a model.

        Args:
            trial: the best trial.
            value: its metric.
            checkpoint: URI and step of its newest checkpoint.
            model: name of the registered model.
            export: the model exported from that checkpoint; None registers the checkpoint itself.
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


# Tune writes no logs and snapshots, as the journal replaces them, and prints nothing. It must not
# handle SIGINT, which `Interrupt` does, and must not change the working directory.
TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
_GRACE_SECONDS = 60.0
Show = Callable[[Standings], None]


@dataclass(frozen=True, kw_only=True)
class SweepDriver:
    """Driver of one launch of a sweep."""

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
    """Number of the launch, counted from 1."""
    lock: Lock
    cleaned: set[str]
    """Ids of the trials whose checkpoints were deleted."""

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
        """Read the journal, record the launch in it, and open the MLflow record."""
        storage = folder.sub(JOURNAL)
        entries = read_journal(folder).entries
        recipe = job.base.recipe
        launches = [entry for entry in entries if entry["kind"] == LAUNCHED]

        # A copied folder must not write to the MLflow runs of the original.
        def is_copied(original: str) -> bool:
            if found := is_copy(folder, original, _read_mlflow_run_id):
                warn(f"{folder.uri()}: a copy of {original}; it gets new MLflow runs")
            return found

        data = find_training_data(recipe)
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
        reported_steps = {
            trial.id: trial.last.step for trial in standings.trials.values() if trial.last
        }
        driver = cls(
            config=config,
            folder=folder,
            job=replace(job, told=reported_steps),
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
            record.begin(trial, driver.recipe_of(trial.id, trial.values))
        return driver

    def to_end(self, shares: Slots, trials: int, tokens: int, began: float) -> Status:
        """Run the remaining trials, register the best one and write the report.

        The record is closed with `FINISHED`, `KILLED` or `FAILED`, also if an error is raised.
        """
        # The status if anything below raises.
        status: Status = "FAILED"
        # The exported model in it is uploaded in the background until the record is closed.
        scratch = TemporaryDirectory()
        try:
            with self.interrupt.heard(
                lambda name: self.warn(f"{name}: ending the sweep with the best trial so far")
            ):
                self.interrupt.run(
                    lambda: self._run_trials(shares, trials, tokens, began),
                    _GRACE_SECONDS,
                    lambda name: None,
                )
            over = all(trial.is_over for trial in self.standings.trials.values())
            status = "FINISHED" if over and not self.interrupt.signal else "KILLED"
            self._register_best(Path(scratch.name))
            self._delete_checkpoints(at_the_end=status == "FINISHED")
            self._publish()
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            with shield_from_signals("closing the sweep's record"):
                self.journal.flush()
                self.record.whole.finish(status)
                scratch.cleanup()
        return status

    def note(self, entry: dict[str, Any]) -> None:
        """Write an entry to the journal, then apply it to the standings, the record and the
        display."""
        kind = entry["kind"]
        with self.lock:
            # The entry is on storage before it has consequences: the next launch replays them from
            # it.
            self.journal.add(kind, {key: value for key, value in entry.items() if key != "kind"})
            self.journal.flush()
            self.standings.apply(entry)
        if kind == SUGGESTED:
            trial = self.standings.trials[entry["trial"]]
            self.record.begin(trial, self.recipe_of(trial.id, trial.values))
        elif kind == CONCLUDED:
            self.record.conclude(self.standings.trials[entry["trial"]])
            # The process of this trial may not have closed its run yet.
            self._delete_checkpoints(but=entry["trial"])
        self.show(self.standings)

    def recipe_of(self, id: str, values: Mapping[str, Value]) -> Recipe | None:
        """Return the recipe of a trial; None if its values are invalid."""
        try:
            return self.job.recipe(id, values)
        except UserError:
            return None

    def _run_trials(self, shares: Slots, trials: int, tokens: int, began: float) -> None:
        config = self.config
        common = {"metric": config.metric, "mode": config.mode}
        scheduler = build_scheduler(config.scheduler, config.space, **common, trial_tokens=tokens)
        is_pbt = isinstance(config.scheduler, PbtConfig)
        # Population based training exchanges states among all trials, so Tune needs all of them
        # from the start; those beyond the cluster's capacity take turns.
        at_a_time = trials if is_pbt else shares.count
        suggestions = Suggestions(
            build_searcher(config.searcher, config.space, **common),
            scheduler,
            self.standings,
            self.entries,
            trials=trials,
            at_a_time=at_a_time,
            problem=self._find_problem,
            note=self.note,
        )
        # Tune reads these settings from the environment only.
        os.environ.update(TUNE_SETTINGS, TUNE_MAX_PENDING_TRIALS_PG=str(at_a_time))
        trainable = tune.with_parameters(TrialActor, job=self.job)
        bundle = {"CPU": shares.cpus, **({"GPU": shares.gpus} if shares.gpus else {})}
        end = began + config.max_seconds if config.max_seconds else math.inf
        # Errors are in the journal; Tune would print each with pages of tracebacks.
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
            # Starting a process and importing PyTorch takes seconds, so processes run many trials.
            reuse_actors=True,
            # A failed trial is a result; the others continue.
            raise_on_failed_trial=False,
            verbose=0,
        )
        # A next launch continues from the journal and never from Tune's own files.
        self.folder.sub("ray").delete()

    def _find_problem(self, id: str, values: Mapping[str, Value]) -> str | None:
        try:
            self.job.recipe(id, values)
        except UserError as error:
            return "; ".join(error.problems)
        return None

    def _register_best(self, scratch: Path) -> None:
        best = self.standings.best()
        if best is None:
            return
        checkpoints = self.job.folder.sub(best.id, "checkpoints")
        saved_commits = list_commits(checkpoints)
        newest = (
            (checkpoints.uri(saved_commits[0].folder), saved_commits[0].step)
            if saved_commits
            else None
        )
        name = self.folder.url.rpartition("/")[2]
        export = self._export_best(best.id, scratch) if newest else None
        self.record.mark_best(best, best.value(self.config.metric), newest, name, export)

    def _export_best(self, trial: str, scratch: Path) -> LoadableModel | None:
        """Export the newest state of a trial as a model for MLflow; return None if that fails."""
        try:
            model = export_model(self.job.folder.uri(trial), scratch / "model")
            return to_loadable(model, scratch / "mlmodel")
        except Exception as error:  # the checkpoint can still be registered
            self.warn(f"the best trial's model is in MLflow only as a checkpoint: {error}")
            return None

    def _delete_checkpoints(self, *, but: str = "", at_the_end: bool = False) -> None:
        """Delete the checkpoints of all trials that are over, except those of the best trial."""
        # Population based training may copy from any trial until the sweep ends.
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
        except Exception as error:  # a failed plot must not fail the sweep
            self.warn(f"cannot write the report of the sweep: {error}")


def _read_mlflow_run_id(folder: Storage) -> str | None:
    launches = [entry for entry in read_journal(folder).entries if entry["kind"] == LAUNCHED]
    return launches[-1]["mlflow_run_id"] if launches else None


class _Stop(tune.Stopper):
    """Stopper that ends all trials when a condition holds."""

    def __init__(self, is_time: Callable[[], bool]) -> None:
        self._is_time = is_time

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles stoppers for its own resumption, which is not used

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._is_time()


class Watch(Callback):
    """Callback through which Tune reports events to the driver.

    Tune calls it for one event after the other, so that the journal has a single writer.

    Args:
        standings: the sweep's standings.
        note: called with an entry for the journal.
        told: called with a trial's id and every report, also a repeated one.
        warn: called with one line about a problem that does not end the sweep.
    """

    def __init__(
        self,
        standings: Standings,
        note: Callable[[dict[str, Any]], None],
        told: Callable[[str, Report], None],
        warn: Callable[[str], None],
    ) -> None:
        self._standings, self._note, self._on_report, self._warn = standings, note, told, warn

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: Any, **info: Any
    ) -> None:
        """Record a report, and conclude the trial if it has ended."""
        # Tune keeps and copies the last result of every trial, which the steps would bloat.
        report: Report = result.pop(REPORT)
        sweep_trial = self._standings.trials[str(trial)]
        self._on_report(str(trial), report)
        if report.copied:
            self._note({"kind": COPIED, "trial": str(trial), **asdict(report.copied)})
        # A restarted trial repeats reports that the journal already has.
        is_news = (
            not sweep_trial.last or report.step > sweep_trial.last.step or report.copied is not None
        )
        if report.metrics and is_news:
            self._note({"kind": REPORTED, **report_entry(str(trial), report)})
        if result.get("done"):
            # A trial that is done before its last step was stopped by the scheduler.
            state = "stopped" if report.state == "running" else report.state
            self._conclude(str(trial), state, report.text)

    def on_trial_recover(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """Warn that the process of a trial died and that another one continues it."""
        self._warn(f"trial {trial!s}: its process died; resuming from its checkpoint")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """Conclude a trial whose process has died more than `max_failures` times."""
        self._conclude(str(trial), "failed", f"its process died{_format_reason(trial)}")

    def _conclude(self, id: str, state: str, text: str) -> None:
        if not self._standings.trials[id].is_over:
            self._note({"kind": CONCLUDED, "trial": id, "state": state, "text": text})


def _format_reason(trial: TuneTrial) -> str:
    error = trial.get_error()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] if error else []
    # The last line of a traceback names the error.
    return f": {lines[-1][:200]}" if lines else ""
