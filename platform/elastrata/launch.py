"""The launch: one training run, from a recipe to its last checkpoint, on Ray Train."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback

from elastrata import history
from elastrata.commit import commits
from elastrata.events import Event
from elastrata.facts import start_tags
from elastrata.mailbox import Receiver, open_mailbox
from elastrata.observer import Observer
from elastrata.preflight import TrainingData, cluster_problems, training_data
from elastrata.recipe import Recipe
from elastrata.run_folder import (
    RunIdentity,
    check_same_run,
    flatten,
    read_identity,
    write_identity,
)
from elastrata.source import Source
from elastrata.tracking import Tracker, open_tracker
from elastrata.worker import STREAM, Job, train_worker
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import StreamConfig

CONTROLLER_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
}
"""How often Ray Train's controller looks at the workers, and how long it waits for a group to
start before it asks for another size. Ray takes them from the driver's environment only."""


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
    show: Callable[[Event], None],
) -> TrainResult:
    """Trains a recipe to its last step, or continues the run of that name from its newest state.

    Ray must be running.

    Args:
        recipe: what to train.
        name: of the run; its folder in `recipe.storage`.
        show: called with every event, from a thread of its own.

    Raises:
        UserError: something in the recipe, the data or the cluster cannot work.
        RuntimeError: training failed; says how.
    """
    data = training_data(recipe)
    gpus = _gpus_per_worker(recipe)
    if problems := cluster_problems(recipe, gpus, _cluster_resources()):
        raise UserError(*problems)
    root = Storage(recipe.storage)
    run = root.sub(name)
    tracker = _open_run(recipe, name, run, root, data)
    status = "FAILED"
    try:
        if not _is_finished(run, recipe.steps):
            _fit(recipe, run, data, gpus, Observer(tracker, show))
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        tracker.finish(status)  # type: ignore[arg-type]
    return _result(run, tracker.run_id, status)


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _gpus_per_worker(recipe: Recipe) -> float:
    if recipe.workers.gpus == "auto":
        return 1.0 if _cluster_resources().get("GPU", 0) >= 1 else 0.0
    return recipe.workers.gpus


def _open_run(
    recipe: Recipe, name: str, run: Storage, root: Storage, data: TrainingData
) -> Tracker:
    """Starts the run's folder and record, or checks that they are this run's and goes on."""
    fingerprint = data.train.manifest.fingerprint
    identity = read_identity(run)
    if identity:
        check_same_run(run, identity, recipe, fingerprint)
    tracker = open_tracker(
        recipe.tracking,
        root,
        run_name=name,
        run_id=identity.mlflow_run_id if identity else None,
        params=flatten(recipe.model_dump(mode="json")),
        tags=start_tags(fingerprint, run.uri()),
    )
    write_identity(
        run,
        RunIdentity(name=name, data_fingerprint=fingerprint, mlflow_run_id=tracker.run_id),
        recipe,
    )
    return tracker


def _is_finished(run: Storage, steps: int) -> bool:
    newest = next(iter(commits(run.sub("checkpoints"))), None)
    return newest is not None and newest.step >= steps


def _fit(recipe: Recipe, run: Storage, data: TrainingData, gpus: float, observer: Observer) -> None:
    os.environ.update(CONTROLLER_SETTINGS)
    mailbox = open_mailbox()
    job = Job(recipe=recipe, run=run, batches=data.train, held_out=data.held_out, mailbox=mailbox)
    source = Source(
        run=run,
        batches=data.train,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        mailbox=mailbox,
    )
    launches = history.next_attempt(run.sub("history"))
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        torch_config=ray.train.torch.TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        scaling_config=_scaling(recipe, gpus),
        run_config=RunConfig(
            name=f"launch-{launches:04d}",
            storage_path=run.uri("ray"),
            failure_config=FailureConfig(max_failures=recipe.workers.max_failures),
            callbacks=[_EndOnUserError()],  # type: ignore[list-item]
        ),
        datasets={STREAM: source},
        dataset_config=StreamConfig(data.train),
    )
    receiver = Receiver(mailbox, observer)
    try:
        trainer.fit()
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        receiver.close()
        if observer.refused:
            raise UserError(*observer.refused) from None
        raise RuntimeError(f"training failed: {error}") from error
    receiver.close()


def _scaling(recipe: Recipe, gpus: float) -> ScalingConfig:
    workers = recipe.workers
    elastic = workers.min < workers.max
    return ScalingConfig(
        num_workers=(workers.min, workers.max) if elastic else workers.max,  # type: ignore[arg-type]
        use_gpu=gpus > 0,
        resources_per_worker={"CPU": workers.cpus, **({"GPU": gpus} if gpus else {})},
    )


class _EndOnUserError(UserCallback):
    """Ends the run at once where trying again cannot help: an exception here does that."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, UserError):
                raise error


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
        world_sizes=[entry["world_size"] for entry in entries if entry["kind"] == "started"],
        status=status,
    )
