"""The launch: one training run, from a recipe to its last checkpoint and its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Any

import ray

from elastrata import history
from elastrata.commit import commits, newest_verified
from elastrata.events import Committed, Event, Launched, Warned
from elastrata.facts import start_tags
from elastrata.job import Job, TrainingError
from elastrata.mailbox import Receiver, open_mailbox
from elastrata.observer import Observer, catch_up
from elastrata.phases import Phases
from elastrata.pictures import publish_pictures
from elastrata.preflight import TrainingData, check_storage, cluster_problems, training_data
from elastrata.ray_session import ray_session
from elastrata.recipe import Recipe
from elastrata.run_folder import (
    RunIdentity,
    check_same_run,
    flatten,
    read_identity,
    write_identity,
)
from elastrata.source import Source
from elastrata.tracking import Status, Tracker, open_tracker
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run. The field names are the keys of `elastrata train --json`."""

    run_dir: str
    mlflow_run_id: str
    steps: int
    samples_seen: int
    tokens_seen: int
    final_loss: float
    world_sizes: list[int]
    """World size of every group of workers that took part, in order."""
    status: str


def train(
    recipe: Recipe,
    *,
    name: str,
    address: str | None = None,
    show: Callable[[Event], None],
) -> TrainResult:
    """Trains a recipe to its last step, or continues the run of that name from its newest state.

    Args:
        recipe: what to train.
        name: of the run; its folder in `recipe.storage`.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        show: called with every event, from a thread of its own.

    Raises:
        UserError: something in the recipe, the data or the cluster cannot work.
        TrainingError: training did not come to its end; says why.
    """
    phases = Phases()
    data = training_data(recipe)
    root = Storage(recipe.storage)
    check_storage(root)
    run = root.sub(name)
    identity = read_identity(run)
    if identity:
        check_same_run(run, identity, recipe, data.train.manifest.fingerprint)
    is_finished = _is_finished(run, recipe.steps)
    phases.passed("preflight")
    Thread(target=_import_ahead, daemon=True).start()
    with ray_session(address):
        phases.passed("ray")
        gpus = _gpus_per_worker(recipe)
        if problems := cluster_problems(recipe, gpus, _cluster_resources()):
            raise UserError(*problems)
        tracker = _open_record(recipe, name, run, identity, data)
        phases.passed("record")
        show(Launched(seconds=phases.seconds))
        status: Status = "FAILED"
        try:
            if not is_finished:
                before = history.world_sizes(history.read(run.sub("history")))
                _fit(Observer(tracker, show, before), recipe, run, data, gpus)
            status = "FINISHED"
            _publish(run, data, tracker, show)
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            tracker.finish(status)
    return _result(run, tracker.run_id, status)


def _publish(
    run: Storage, data: TrainingData, tracker: Tracker, show: Callable[[Event], None]
) -> None:
    """A picture that cannot be drawn or written does not undo a finished run."""
    try:
        publish_pictures(run, data.train.manifest.length_histogram, tracker)
    except Exception as error:
        show(Warned(text=f"no pictures of the run: {error}"))


def _import_ahead() -> None:
    """Imports what is needed next while Ray starts, which leaves a core idle: saves 1 to 2 s."""

    import elastrata.trainer  # noqa: F401


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _gpus_per_worker(recipe: Recipe) -> float:
    if recipe.workers.gpus == "auto":
        return 1.0 if _cluster_resources().get("GPU", 0) >= 1 else 0.0
    return recipe.workers.gpus


def _open_record(
    recipe: Recipe, name: str, run: Storage, identity: RunIdentity | None, data: TrainingData
) -> Tracker:
    """Starts the run's folder and its record, or goes on with them."""
    fingerprint = data.train.manifest.fingerprint
    tracker = open_tracker(
        recipe.tracking,
        Storage(recipe.storage),
        run_name=name,
        run_id=identity.mlflow_run_id if identity else None,
        params=flatten(recipe.model_dump(mode="json")),
        tags=start_tags(fingerprint, run.uri()),
    )
    now = RunIdentity(
        name=name,
        data=data.train.url,
        data_fingerprint=fingerprint,
        mlflow_run_id=tracker.run_id,
    )
    write_identity(run, now, recipe)
    if identity:
        catch_up(tracker, history.read(run.sub("history")), _committed(run.sub("checkpoints")))
    return tracker


def _committed(checkpoints: Storage) -> list[Committed]:
    """The checkpoints there are, the oldest first."""
    return [
        Committed(
            step=commit.step,
            uri=checkpoints.uri(commit.folder),
            evaluation_loss=commit.evaluation_loss,
        )
        for commit in reversed(commits(checkpoints))
    ]


def _is_finished(run: Storage, steps: int) -> bool:
    """Whether the newest whole checkpoint is that of the last step.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    newest = newest_verified(run.sub("checkpoints"), lambda _: None)  # told when training begins
    return newest is not None and newest.step >= steps


def _fit(observer: Observer, recipe: Recipe, run: Storage, data: TrainingData, gpus: float) -> None:
    from elastrata.trainer import fit

    mailbox = open_mailbox()
    source = Source(
        run=run,
        batches=data.train,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        mailbox=mailbox,
    )
    receiver = Receiver(mailbox, observer)
    launch = history.next_attempt(run.sub("history"))
    try:
        fit(
            Job(
                recipe=recipe,
                run=run,
                batches=data.train,
                held_out=data.held_out,
                mailbox=mailbox,
            ),
            source,
            gpus_per_worker=gpus,
            launch=launch,
        )
    except TrainingError:
        receiver.close()
        if observer.refused:
            raise UserError(*observer.refused) from None
        raise
    finally:
        receiver.close()
    if not _is_finished(run, recipe.steps):
        raise TrainingError(
            "the last checkpoint could not be saved; the same command redoes the steps after the "
            "one before"
        )


def _result(run: Storage, mlflow_run_id: str, status: str) -> TrainResult:
    entries = history.read(run.sub("history"))
    last: Mapping[str, Any] = history.effective_steps(entries)[-1]
    return TrainResult(
        run_dir=run.uri(),
        mlflow_run_id=mlflow_run_id,
        steps=last["step"],
        samples_seen=last["samples"],
        tokens_seen=last["tokens"],
        final_loss=last["loss"],
        world_sizes=history.world_sizes(entries),
        status=status,
    )
