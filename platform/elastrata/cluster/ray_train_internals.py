"""Ray Train's internals: what this project extends of Ray Train without Ray's promise.

Nothing else imports `ray.train.v2`; a new version of Ray is looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray.train.v2._internal.callbacks.backend_setup import BackendSetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.context import TrainRunContext, get_train_context
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import SchedulingState
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupStateBuilder
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import bundle_to_remote_args, invoke_context_managers
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from typing_extensions import override

__all__ = [
    "CONTROLLER_MODULES",
    "ENV_VARS_TO_PROPAGATE",
    "BackendSetupCallback",
    "ElasticScalingPolicy",
    "FailureConfig",
    "NoopDecision",
    "PlacementGroupCleanerCallback",
    "PlacementGroupHandle",
    "ReplicaGroup",
    "ResizeDecision",
    "RunConfig",
    "ScalingConfig",
    "ScalingDecision",
    "SchedulingState",
    "TrainAutoscalingCoordinatorClient",
    "TrainController",
    "TrainRunContext",
    "Worker",
    "WorkerGroup",
    "WorkerGroupCallback",
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "WorkerGroupStateBuilder",
    "bundle_to_remote_args",
    "invoke_context_managers",
    "label_selectors",
    "training_has_ended",
    "with_controller",
]

CONTROLLER_MODULES = (
    "ray.data._internal.execution.streaming_executor",
    "ray.data._internal.iterator.stream_split_iterator",
    "ray.data._internal.planner.planner",
    "ray.train.v2._internal.callbacks.datasets",
    "ray.train.v2._internal.data_integration.dataset_manager",
)
"""Modules that the actors of a new group's controller import before they are of use."""


@contextmanager
def with_controller(kind: type[TrainController]) -> Iterator[None]:
    """Trainers that run in this block have such a controller: Ray has no parameter for it."""
    module: Any = data_parallel_trainer
    theirs, module.TrainController = module.TrainController, kind
    try:
        yield
    finally:
        module.TrainController = theirs


class _OneForEach(dict[str, str]):
    def __init__(self, selectors: Sequence[Mapping[str, str]]) -> None:
        super().__init__(selectors[0])
        self._left = iter(selectors)

    @override
    def copy(self) -> dict[str, str]:
        return dict(next(self._left))


def label_selectors(selectors: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What the hook before the start of a group returns for a label selector of every worker's own:
    Ray takes a single one, and copies it for each worker, in order.

    Args:
        selectors: of each worker, at least one.
    """
    return _OneForEach(selectors)


def training_has_ended(seconds: float) -> bool:
    """In a worker: whether its training thread ends within so many seconds, or never began."""
    runner = get_train_context().execution_context.training_thread_runner
    if thread := runner._thread:
        thread.join(seconds)
    return not runner.is_running()
