"""Ray Train's internals: what this project extends of Ray Train without Ray's promise.

Nothing else imports `ray.train.v2`; a new version of Ray is looked at here.
"""

from __future__ import annotations

from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

__all__ = [
    "CONTROLLER_MODULES",
    "ENV_VARS_TO_PROPAGATE",
    "ElasticScalingPolicy",
    "FailureConfig",
    "NoopDecision",
    "PlacementGroupCleanerCallback",
    "ResizeDecision",
    "RunConfig",
    "ScalingConfig",
    "ScalingDecision",
    "TrainAutoscalingCoordinatorClient",
    "TrainRunContext",
    "WorkerGroupCallback",
]

CONTROLLER_MODULES = (
    "ray.data._internal.execution.streaming_executor",
    "ray.data._internal.iterator.stream_split_iterator",
    "ray.data._internal.planner.planner",
    "ray.train.v2._internal.callbacks.datasets",
    "ray.train.v2._internal.data_integration.dataset_manager",
)
"""Modules that the actors of a new group's controller import before they are of use."""
