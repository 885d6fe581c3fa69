"""Ray Train's internals: every part of Ray Train that is used but not public.

No other module imports `ray.train.v2` or names an underscore member of Ray Train. The members in
`PRIVATE_MEMBERS` are looked up before a run starts; `cluster/RAY_INTERNALS.md` says what
each is for and what breaks without it. Check this file first when Ray's version changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.train.torch
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    get_or_create_autoscaling_coordinator,
)
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.context import TrainRunContext, get_train_context
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupContext
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.util.placement_group import NODE_ID_LABEL_KEY
from typing_extensions import override

__all__ = [
    "CONTROLLER_MODULES",
    "ControlledTrainer",
    "ControllerCallback",
    "FailureConfig",
    "NoopDecision",
    "PlacedWorkerGroup",
    "PlacementGroupHandle",
    "RayTrainWorker",
    "ResizeDecision",
    "RunConfig",
    "ScalingConfig",
    "ScalingDecision",
    "TrainAutoscalingCoordinatorClient",
    "TrainController",
    "TrainRunContext",
    "Worker",
    "WorkerGroupCallback",
    "WorkerGroupContext",
    "WorkerGroupStartupFailedError",
    "bundle_to_remote_args",
    "get_env_vars_to_propagate",
    "get_or_create_autoscaling_coordinator",
    "missing_members",
    "training_has_ended",
]

CONTROLLER_MODULES = (
    "ray.data._internal.execution.streaming_executor",
    "ray.data._internal.iterator.stream_split_iterator",
    "ray.data._internal.planner.planner",
    "ray.train.v2._internal.callbacks.datasets",
    "ray.train.v2._internal.data_integration.dataset_manager",
)
"""Modules that the actors of a new group's controller import before they are of use."""

PRIVATE_MEMBERS = {
    ray.train.torch.TorchTrainer: ("_initialize_and_run_controller",),
    WorkerGroup: ("_assign_worker_ranks", "_create_placement_group", "_create_workers"),
}
"""The underscore members of Ray Train that this file overrides or calls, by class."""
_POLL_SECONDS = 0.01


def missing_members(
    members: Mapping[Any, Sequence[str]] = PRIVATE_MEMBERS, owner: Any = WorkerGroup
) -> list[str]:
    """Return the members of a class that this version of Ray lacks, as `Class.member`."""
    return [f"{owner.__name__}.{name}" for name in members[owner] if not hasattr(owner, name)]


class ControlledTrainer(ray.train.torch.TorchTrainer):
    """Ray's trainer with a controller and a scaling policy of this project.

    Args:
        arguments: arguments of Ray's trainer.
        controller: class of the actor that controls the workers.
        policy: scaling policy, with the methods of Ray's `ScalingPolicy`.
        variables: environment variables of the controller's process.
        named: further arguments of Ray's trainer.
    """

    def __init__(
        self,
        *arguments: Any,
        controller: type[TrainController],
        policy: ControllerCallback,
        variables: Mapping[str, str],
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._controller, self._policy, self._variables = controller, policy, dict(variables)

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # Ray's trainer has no parameter for the controller's class, its policy or its environment.
        # Its cleaner of placement groups asks the dashboard of whichever cluster answers for the
        # controller, and removes the groups of a live one; the driver removes leaked ones instead.
        arguments["scaling_policy"] = self._policy
        arguments["callbacks"] = [
            callback
            for callback in arguments["callbacks"]
            if not isinstance(callback, PlacementGroupCleanerCallback)
        ]
        variables = {**get_env_vars_to_propagate(), **self._variables}
        kind: Any = ray.remote(
            num_cpus=0,
            # On the driver's node, so that the loss of another node does not end the controller.
            label_selector={NODE_ID_LABEL_KEY: ray.get_runtime_context().get_node_id()},
            runtime_env={"env_vars": variables},
        )
        controller = kind(self._controller).remote(**arguments)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


class PlacedWorkerGroup(WorkerGroup):
    """Ray Train's group of workers; subclasses provide places and processes."""

    def reserve(self, context: WorkerGroupContext) -> PlacementGroupHandle:
        """Reserve resources for the workers of the group."""
        raise NotImplementedError

    def start_workers(self, places: Any) -> list[Worker]:
        """Start the workers of the group and return them once they run, in the order of places.

        Args:
            places: `placement_group` of the handle that `reserve` returned.
        """
        raise NotImplementedError

    @override
    def _create_placement_group(
        self, scaling_config: ScalingConfig, worker_group_context: WorkerGroupContext
    ) -> PlacementGroupHandle:
        return self.reserve(worker_group_context)

    @override
    def _create_workers(
        self, num_workers: int, placement_group: Any, *arguments: Any, **named: Any
    ) -> list[Worker]:
        return self._assign_worker_ranks(self.start_workers(placement_group))


def training_has_ended(seconds: float) -> bool:
    """In a worker: return True once its training thread has ended, False after `seconds`."""
    # Ray Train has no public way to the training thread.
    runner = get_train_context().execution_context.training_thread_runner
    deadline = time.monotonic() + seconds
    while runner.is_running() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return not runner.is_running()
