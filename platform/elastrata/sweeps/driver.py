"""The drive of a sweep: one driver's part in it, from what the journal says to the report."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from ray import tune

from elastrata.checkpoints.commit import commits
from elastrata.cluster.interrupt import Interrupt, undisturbed
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.claim import SWEEP_FILE, is_copy
from elastrata.run.evidence import note_removal
from elastrata.run.export import export_model, loadable
from elastrata.run.facts import data_params, recipe_params, start_tags
from elastrata.run.history import HistoryWriter
from elastrata.sweeps.domains import Value
from elastrata.sweeps.folder import BASE_FILE, JOURNAL, read_journal, sweep_digest
from elastrata.sweeps.publish import publish
from elastrata.sweeps.record import SweepRecord
from elastrata.sweeps.schedulers import PbtConfig, build_scheduler
from elastrata.sweeps.searchers import build_searcher
from elastrata.sweeps.slots import Slots
from elastrata.sweeps.standings import CONCLUDED, LAUNCHED, SUGGESTED, Standings
from elastrata.sweeps.suggestions import Suggestions
from elastrata.sweeps.sweep import SweepConfig
from elastrata.sweeps.trainable import TrialActor, Watch
from elastrata.sweeps.trial_recipe import TrialJob
from elastrata.tracking.models import LoadableModel
from elastrata.tracking.tracker import Status, open_tracker
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

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
            most=trials,
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
            search_alg=suggestions,
            scheduler=scheduler,
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
            publish(self.folder, self.standings, self.config, self.record.whole)
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
