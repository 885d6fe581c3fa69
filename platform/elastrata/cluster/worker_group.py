"""The group of workers: a job on Ray Train, with workers that join and leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from operator import itemgetter
from typing import Any

import ray
import ray.train
import ray.train.torch
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import UserCallback

from elastrata.cluster import prestarted
from elastrata.cluster.channel import send_event
from elastrata.cluster.failure_attribution import Repetition, creation_error, find_culprits
from elastrata.cluster.hang_trace import TRACE_VARIABLES, group_timeout
from elastrata.cluster.job import Job
from elastrata.cluster.leaked_placement_groups import remove_leaked
from elastrata.cluster.node_speeds import (
    STEPS_IN_A_GROUP,
    FixedFactors,
    MeasuredSpeeds,
    kinds_by_node,
)
from elastrata.cluster.ray_train_internals import (
    CONTROLLER_MODULES,
    ControlledTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainController,
    WorkerGroupCallback,
    missing_members,
)
from elastrata.cluster.scaling_policy import GracefulScalingPolicy, SlowNodes
from elastrata.cluster.source import Source
from elastrata.cluster.staying_workers import (
    STAYING_VARIABLES,
    STAYING_WORKER_VARIABLES,
    WORKER_VARIABLES,
    TrainControllerWithHandover,
)
from elastrata.cluster.worker import SPARES_AFTER_SECONDS, STREAM, train_worker
from elastrata.device.capabilities import PEAKS, spare_bytes
from elastrata.parallel.mesh import backends
from elastrata.parallel.parallelize import ParallelConfig
from elastrata.recipe.recipe import WorkersConfig
from elastrata.run import history
from elastrata.step.events import (
    ControllerLostError,
    Lost,
    Refused,
    Stopped,
    TrainingError,
    Warned,
)
from elastrata.workload.workload import Workload
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.speeds import SpeedSource, equal_speeds
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import StreamConfig

CONTROLLER_VARIABLES = {
    # how often Ray Train's controller polls the workers; default 2 s
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    # how long it waits for a group to start before it asks for another size; default 60 s
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
    # `GracefulScalingPolicy` watches for nodes that are being drained
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # how long it waits for workers to leave their process group before it kills them: those whose
    # peer has raised wait in NCCL for ever
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    # as Ray's own trainer sets it: the controller waits for workers in asynchronous methods
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}
"""Environment of Ray Train's controller."""
WORKER_MODULES = ("elastrata.cluster.worker_group", "ray.train.torch", "ray.tune", "torch._dynamo")
_WORKLOAD_MODULES = ("model", "parallel")
"""Modules of a workload's package, if they exist, that are imported when a model is built."""
_SOURCE_MODULES = ("elastrata.cluster.source", *CONTROLLER_MODULES)
"""Modules that the processes of a new group import before they are of use, besides the workload."""
# Idle readers have run tasks and cannot become actors, but look like spares.
CONTROLLER_SPARES = 5
"""Spares for a new group's barrier, data sets and splits, and two for idle readers."""

# Ray's controller survives the first kind in any worker. The second one, which Ray's own memory
# monitor causes, makes it give up.
_DEATHS = (RayActorError, OutOfMemoryError)
"""Ray's errors for processes that are gone."""


def run_job(job: Job, *, gpus_per_worker: float, launch: str, max_failures: int) -> None:
    """Run a job to its last step.

    Args:
        job: the job that every worker receives.
        gpus_per_worker: GPUs per worker; 0 trains on CPUs.
        launch: name of this call, unique for the run.
        max_failures: losses of workers to survive; -1 for any number.

    Raises:
        ControllerLostError: Ray Train's controller died, or gave up as another process did.
        UserError: the controller or a worker cannot be made, so another one could not, either.
        TrainingError: more groups of workers were lost than the recipe allows, or trying again
            cannot help, or the run was asked to stop.
    """
    workers, parallel = job.recipe.workers, job.recipe.parallel
    scaling, stay = _scaling(workers, gpus_per_worker), workers.stay
    if stay and (missing := missing_members()):
        stay = False
        line = (
            f"workers.stay: Ray {ray.__version__} has no {', '.join(missing)}: all workers are "
            "restarted when one is lost, added or removed"
        )
        send_event(job.channel, Warned(text=line))
    policy = GracefulScalingPolicy(
        scaling,
        job.channel,
        run=job.run.uri(),
        multiple=parallel.group_size,
        grace_seconds=job.recipe.checkpoint.grace_seconds,
        slow=SlowNodes(job.channel, limit) if (limit := workers.exclude_slower_than) else None,
        tensor=parallel.tensor,
        **_order_arguments(parallel),
    )
    source = Source(
        job.run,
        job.phases,
        channel=job.channel,
        replicas=job.replicas,
        # Measured speeds change during training, so few steps are read together.
        max_steps=STEPS_IN_A_GROUP if workers.speeds == "measured" else None,
    )
    trainer = ControlledTrainer(
        train_worker,
        controller=TrainControllerWithHandover if stay else TrainController,
        policy=policy,
        variables={
            **CONTROLLER_VARIABLES,
            **prestarted.runtime_env(_SOURCE_MODULES)["env_vars"],
            **(STAYING_VARIABLES if stay else {}),
        },
        train_loop_config={"job": job},
        torch_config=ray.train.torch.TorchConfig(
            backend=backends("cuda" if gpus_per_worker else "cpu"),
            timeout_s=round(group_timeout(workers.hang_seconds)),
        ),
        scaling_config=scaling,
        run_config=RunConfig(
            # Ray binds its notes about a launch to its version, so a launch must not read older
            # notes.
            name=launch,
            **_storage_arguments(job.run.sub("ray")),
            failure_config=FailureConfig(max_failures=max_failures),
            worker_runtime_env=prestarted.runtime_env(
                worker_modules(job.recipe.workload), worker_variables(stay=stay)
            ),
            callbacks=_callbacks(job, source),
        ),
        datasets={STREAM: source},
        dataset_config=StreamConfig(
            job.phases,
            # The ranks of a tensor group, and of a pipeline, read the same rows.
            copies=parallel.tensor,
            repeats=parallel.pipeline,
            speeds=_speeds(workers.speeds, parallel, job.channel),
            kinds=kinds_by_node(job.recipe),
        ),
    )
    try:
        trainer.fit()
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        # The next controller needs the resources of the dead one.
        remove_leaked(job.run.uri())
        cause = getattr(error, "controller_failure", error)
        if isinstance(cause, UserError):
            raise cause from error
        is_of_controller = isinstance(cause, RayActorError) and "TrainController" in str(cause)
        if is_of_controller and (reason := creation_error(cause)):
            raise UserError(f"Ray Train's controller cannot start: {reason}") from error
        if isinstance(cause, _DEATHS):
            raise ControllerLostError(_describe_death(cause)) from error
        raise TrainingError(_find_first_cause(error)) from error


def _storage_arguments(folder: Storage) -> dict[str, Any]:
    """Return the storage arguments of Ray Train's `RunConfig` for its own notes in a folder."""
    if folder.is_local:
        return {"storage_path": folder.uri()}
    # Ray's own file systems would need separate credentials.
    through_fsspec = PyFileSystem(FSSpecHandler(folder.fs))
    return {"storage_path": folder.path(), "storage_filesystem": through_fsspec}


def _speeds(
    speeds: str | Mapping[str, float], parallel: ParallelConfig, channel: Any
) -> Callable[[Sequence[str]], SpeedSource]:
    """Return a function from the nodes of a group's workers to their speeds."""
    if speeds == "equal":
        return equal_speeds
    shared = {"copies": parallel.tensor, "repeats": parallel.pipeline}
    if isinstance(speeds, str):
        return MeasuredSpeeds(channel=channel, **shared)
    return FixedFactors(factors=speeds, **shared)


def _order_arguments(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the policy's arguments that order ranks by node speed, if stages differ in speed."""
    speeds = parallel.stage_speeds
    if speeds is None:
        return {}
    peaks = {family: peak.flops for family, peak in PEAKS.items()}
    return {"peaks": peaks, "fastest_first": speeds[0] >= speeds[-1]}


def _callbacks(job: Job, source: Source) -> list[Any]:
    spares = [_Spares()] if job.recipe.workers.spares else []
    return [_Faults(job.channel, job.run), source, *spares]


def worker_variables(*, stay: bool) -> dict[str, str]:
    """Return the environment of workers that serve in several groups, or in one only."""
    return {**TRACE_VARIABLES, **(STAYING_WORKER_VARIABLES if stay else WORKER_VARIABLES)}


def worker_modules(workload: Workload) -> tuple[str, ...]:
    """Return the modules, all existing, that a worker's process imports ahead."""
    package = type(workload).__module__.rpartition(".")[0]
    workload_modules = [f"{package}.{name}" for name in _WORKLOAD_MODULES if package]
    return (*WORKER_MODULES, *(name for name in workload_modules if find_spec(name)))


def _scaling(workers: WorkersConfig, gpus: float) -> ScalingConfig:
    return ScalingConfig(
        num_workers=(workers.min, workers.most),
        use_gpu=gpus > 0,
        resources_per_worker={"CPU": workers.cpus, **({"GPU": gpus} if gpus else {})},
        elastic_resize_monitor_interval_s=workers.resize_seconds,
    )


def _find_first_cause(error: Exception) -> str:
    """Return the first cause of an error, without its way through Ray's processes."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


class _Spares(WorkerGroupCallback):
    """Spare processes for the actors that the controller starts; runs in the controller."""

    def __init__(self) -> None:
        self._spares: prestarted.SparePool | None = None

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        count = prestarted.count_affordable(CONTROLLER_SPARES, spare_bytes())
        self._spares = self._spares or prestarted.SparePool(count, after=SPARES_AFTER_SECONDS)


class _Faults(UserCallback):
    """Callback that reports lost workers to the driver and ends the run if a retry cannot help."""

    def __init__(self, channel: Any, run: Storage) -> None:
        self._channel, self._run = channel, run
        self._repetition = Repetition()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, UserError | TrainingError | Stopped):
                raise error  # an exception here ends the run
        causes = {rank: _unwrap(error) for rank, error in worker_exceptions.items()}
        dead = {rank: error for rank, error in causes.items() if isinstance(error, _DEATHS)}
        lost = dead or find_culprits(causes)  # the others' errors only result from theirs
        rank, error = min(lost.items(), key=itemgetter(0))
        text = f"rank {rank}: {_describe_death(error) if dead else _first_line(error)}"
        if self._repetition.is_certain(error, self._newest_step()):
            line = f"{text}; it ended the group of workers before in the same way"
            send_event(self._channel, Refused(problems=(line,)))
            raise TrainingError(line)
        send_event(self._channel, Lost(text=text, ranks=tuple(sorted(lost))))

    def _newest_step(self) -> int:
        """Return the newest step in the history; -1 if that cannot be read."""
        with suppress(Exception):  # storage may be away
            entries = history.read_entries(self._run.sub("history"))
            return max((entry["step"] for entry in entries if entry["kind"] == "step"), default=0)
        return -1


def _unwrap(error: Exception) -> Exception:
    """Return the error of a worker without Ray Train's wrapper for failed health checks."""
    cause: Exception = getattr(error, "health_check_failure", error)
    return cause


def _describe_death(error: Exception) -> str:
    """Describe in one line how a process ended."""
    text = " ".join(str(error).split())
    if "running low on memory" in text:
        return "its process was killed because the node ran out of memory"
    _, separator, detail = text.partition("Worker exit detail: ")
    return f"its process is gone ({detail.split('.')[0]})" if separator else "its process is gone"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
