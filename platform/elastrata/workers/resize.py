"""When the group of workers changes its size: not before its state is safe.

Ray's own elastic policy kills the workers in the middle of a step. This one asks them, through the
mailbox, to save their state and halt, and resizes when they have. It also sees nodes that are about
to go (`ray drain-node`, a spot machine's notice) before they are gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
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
from ray.train.v2.api.config import ScalingConfig
from typing_extensions import override

from elastrata.training.request import Act, Request
from elastrata.workers.nodes import draining, elsewhere, nodes, unreachable

_SECONDS_TO_ANSWER = 5.0
_ROUNDING = 1e-6
"""Ray adds up fractions of a CPU; three workers of 0.4 need no more than 1.2."""


class ResizePolicy(ElasticScalingPolicy):
    """Decides the number of workers, between the recipe's bounds, in Ray Train's controller.

    Args:
        scaling: with the bounds, and how often a resize upward is considered.
        mailbox: to ask the workers through.
        run: what Ray's reservations are for. A controller that follows one that died takes them
            over; another name's would bar it from these resources for three minutes.
        multiple: workers come in whole numbers of so many; what is left over waits as spares.
        grace_seconds: how long the workers may take to save their state.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        mailbox: Any,
        *,
        run: str,
        multiple: int,
        grace_seconds: float,
    ) -> None:
        super().__init__(scaling)
        self._mailbox = mailbox
        self._run = run
        self._multiple = multiple
        self._grace_seconds = grace_seconds
        self._deadline: float | None = 0.0  # a controller before this one may have asked
        self._warned_of: frozenset[str] = frozenset()
        self._avoided: frozenset[str] = frozenset()

    @override
    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        self._requester_id = self._run
        self._coordinator_client = TrainAutoscalingCoordinatorClient(self._run)
        self._send_resource_request()  # type: ignore[no-untyped-call]

    @override
    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        if self._deadline is not None:
            self._deadline = None
            self._call("withdraw", Act.HALT)
        return super().make_decision_for_non_running_worker_group()

    @override
    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        if self._deadline is None:
            self._deadline = self._ask(worker_group_state, worker_group_status)
            return NoopDecision()
        if not self._call("has_halted") and time.monotonic() < self._deadline:
            return NoopDecision()
        return self._resize()

    def _ask(self, group: Any, status: Any) -> float | None:
        """Asks the workers to halt where there is a reason; returns until when we wait for them."""
        leaving = draining() & {worker.metadata.node_id for worker in group.workers}
        if leaving - self._warned_of:
            self._warned_of |= leaving
            return self._make_way(group, leaving)
        decision = super().make_decision_for_running_worker_group(group, status)
        if not isinstance(decision, ResizeDecision) or decision.num_workers == group.num_workers:
            return None
        return self._halt("resize", f"{group.num_workers} -> {decision.num_workers} workers")

    def _make_way(self, group: Any, leaving: frozenset[str]) -> float | None:
        """Halts for a smaller group where one is allowed; else only saves, and waits for the end
        of the node."""
        text = f"{len(leaving)} node{'s' * (len(leaving) > 1)} to go"
        staying = sum(worker.metadata.node_id not in leaving for worker in group.workers)
        if max(staying, self._possible()) >= self.scaling_config.min_workers:
            return self._halt("drain", text)
        self._call("ask", Request(act=Act.SAVE, reason="drain", text=text))
        return None

    def _halt(self, reason: str, text: str) -> float:
        self._call("ask", Request(act=Act.HALT, reason=reason, text=text))
        return time.monotonic() + self._grace_seconds

    def _resize(self) -> ScalingDecision:
        """A new group of whatever size there is room for now; none until there is enough."""
        count = self._possible()
        if count < self.scaling_config.min_workers:
            return NoopDecision()
        self._deadline = None
        self._call("withdraw", Act.HALT)
        return self._get_resize_decision(count)

    def _possible(self) -> int:
        """The workers there is room for, from a fresh view of the cluster."""
        self._send_resource_request()  # type: ignore[no-untyped-call]
        self._latest_reserved_resources_query_time = float("-inf")
        reserved = self._get_reserved_resources()
        return self._count_possible_workers(reserved) if reserved else 0

    @override
    def _get_reserved_resources(self) -> Any:
        age = time.monotonic() - self._latest_reserved_resources_query_time
        if age < self.GET_RESERVED_RESOURCES_INTERVAL_S:
            return self._latest_reserved_resources
        # Without `recompute` a node that died less than 20 s ago is still counted on.
        call = self._autoscaling_coordinator.get_reserved_resources
        try:
            reserved = ray.get(
                call.remote(self._requester_id, recompute=True), timeout=_SECONDS_TO_ANSWER
            )
        except ray.exceptions.RayError:
            reserved = None
        self._latest_reserved_resources_query_time = time.monotonic()
        self._latest_reserved_resources = reserved
        return reserved

    @override
    def _get_num_workers_for_resource_request(self) -> int:
        """The most workers, and once more those that nodes about to go have room for: else Ray
        might reserve room on these alone."""
        avoided = self._avoided | draining()
        leaving = [n["Resources"] for n in nodes() if n["NodeID"] in avoided and n["Alive"]]
        return self.scaling_config.max_workers + sum(map(self._room, leaving))

    @override
    def _count_possible_workers(self, reserved_resources: Any) -> int:
        self._avoided = draining() | unreachable()
        staying = [r for node, r in reserved_resources.items() if node not in self._avoided]
        count = min(sum(map(self._room, staying)), self.scaling_config.max_workers)
        return count - count % self._multiple

    @override
    def on_controller_start_worker_group(
        self, *, scaling_config: ScalingConfig, num_workers: int
    ) -> dict[str, str] | None:
        """Where the workers may be placed: Ray would take nodes that it has not yet missed."""
        return elsewhere(self._avoided)

    def _room(self, resources: Mapping[str, float]) -> int:
        """Workers that fit into the resources of one node."""
        wanted = self.scaling_config._resources_per_worker_not_none
        fitting = [
            (resources.get(name, 0.0) + _ROUNDING) // amount
            for name, amount in wanted.items()
            if amount > 0
        ]
        return int(min(fitting, default=self.scaling_config.max_workers))

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls the mailbox; one that does not answer is one that halts nobody."""
        try:
            return ray.get(
                getattr(self._mailbox, method).remote(*arguments), timeout=_SECONDS_TO_ANSWER
            )
        except ray.exceptions.RayError:
            return None
