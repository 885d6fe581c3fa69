"""The trainer: a job on Ray Train, with workers that come and go."""

from __future__ import annotations

import os
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)

from elastrata.job import Job, TrainingError
from elastrata.recipe import WorkersConfig
from elastrata.source import Source
from elastrata.worker import STREAM, train_worker
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.stream import StreamConfig

CONTROLLER_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
}
"""How often Ray Train's controller looks at the workers, and how long it waits for a group to
start before it asks for another size. Ray takes them from the driver's environment only."""


def fit(job: Job, source: Source, *, gpus_per_worker: float, launch: int) -> None:
    """Runs a job to its last step.

    Args:
        job: what the workers are told.
        source: gives every new group of workers its stream.
        gpus_per_worker: 0 trains on CPUs.
        launch: a number that no earlier call for the same run had. Ray's own notes about a launch
            are bound to its version, so a launch never reads those of another.

    Raises:
        TrainingError: more groups of workers were lost than the recipe allows, or the input of
            a worker cannot work.
    """
    os.environ.update(CONTROLLER_SETTINGS)
    workers = job.recipe.workers
    trainer = _Trainer(
        train_worker,
        train_loop_config={"job": job},
        torch_config=ray.train.torch.TorchConfig(
            backend="cpu:gloo,cuda:nccl" if gpus_per_worker else "gloo"
        ),
        scaling_config=_scaling(workers, gpus_per_worker),
        run_config=RunConfig(
            name=f"launch-{launch:04d}",
            storage_path=job.run.uri("ray"),
            failure_config=FailureConfig(max_failures=workers.max_failures),
            callbacks=[_EndOnUserError()],  # type: ignore[list-item]
        ),
        datasets={STREAM: source},
        dataset_config=StreamConfig(job.batches),
    )
    try:
        trainer.fit()
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        raise TrainingError(_last_line(error)) from error


def _scaling(workers: WorkersConfig, gpus: float) -> ScalingConfig:
    elastic = workers.min < workers.max
    return ScalingConfig(
        num_workers=(workers.min, workers.max) if elastic else workers.max,  # type: ignore[arg-type]
        use_gpu=gpus > 0,
        resources_per_worker={"CPU": workers.cpus, **({"GPU": gpus} if gpus else {})},
    )


def _last_line(error: Exception) -> str:
    """What went wrong first, without the way it came through Ray's processes."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


class _Trainer(ray.train.torch.TorchTrainer):
    """Without Ray's cleaner of placement groups where the cluster has no dashboard.

    The cleaner asks the dashboard every second whether the controller lives. A cluster without one
    makes it ask whatever dashboard listens on the default port: when another cluster on the machine
    has one, that does not know the controller, and the cleaner takes the workers' resources away.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        if ray._private.worker.get_dashboard_url():  # type: ignore[no-untyped-call]
            return callbacks
        return [c for c in callbacks if not isinstance(c, PlacementGroupCleanerCallback)]


class _EndOnUserError(UserCallback):
    """Ends the run at once where trying again cannot help: an exception here does that."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, UserError):
                raise error
