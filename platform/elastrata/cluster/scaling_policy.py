"""When the group of workers changes its size: not before its state is safe.

Ray's own elastic policy kills the workers in the middle of a step. This one asks them, through the
channel, to save their state and halt, and resizes when they have. It also sees nodes that are about
to go (`ray drain-node`, a spot machine's notice) before they are gone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import ray
from typing_extensions import override

from elastrata.cluster.autoscaler import launches_nodes, refuses
from elastrata.cluster.demand import Demand
from elastrata.cluster.leaked_placement_groups import note_controller
from elastrata.cluster.nodes import draining, elsewhere, nodes, unreachable
from elastrata.cluster.ray_internals import free_resources
from elastrata.cluster.ray_train_internals import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingConfig,
    ScalingDecision,
    TrainAutoscalingCoordinatorClient,
    TrainRunContext,
)
from elastrata.core.control_signal import Action, ControlSignal

_SECONDS_TO_ANSWER = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0
"""At the whole cluster: every node is asked for a connection."""
_PATIENCE_SECONDS = (45.0, 90.0)
"""Until a run asks again for what an autoscaler refused; drawn for each run."""
_ROUNDING = 1e-6
"""Ray adds up fractions of a CPU; three workers of 0.4 need no more than 1.2."""


class ResizePolicy(ElasticScalingPolicy):
    """Decides the number of workers, between the recipe's bounds, in Ray Train's controller.

    Args:
        scaling: with the bounds, and how often a resize upward is considered.
        channel: to ask the workers through.
        run: what Ray's reservations are for. A controller that follows one that died takes them
            over; another name's would bar it from these resources for three minutes.
        multiple: workers come in whole numbers of so many; what is left over waits as spares.
        grace_seconds: how long the workers may take to save their state.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        channel: Any,
        *,
        run: str,
        multiple: int,
        grace_seconds: float,
    ) -> None:
        super().__init__(scaling)
        self._channel = channel
        self._run = run
        self._multiple = multiple
        self._grace_seconds = grace_seconds
        self._asked: ControlSignal | None = None
        self._deadline = 0.0
        self._warned_of: frozenset[str] = frozenset()
        self._avoided: frozenset[str] = frozenset()
        self._own_nodes: frozenset[str] = frozenset()
        self._looked = float("-inf")
        self._demand = Demand(
            least=scaling.min_workers, patience=random.uniform(*_PATIENCE_SECONDS)
        )
        self._demanded: int | None = None
        self._reserved_count = 0
        self._demand_looked = float("-inf")

    @override
    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        note_controller(self._run)
        self._requester_id = self._run
        self._coordinator_client = TrainAutoscalingCoordinatorClient(self._run)
        self._send_resource_request()  # type: ignore[no-untyped-call]
        self._withdraw()  # what a controller before this one may have asked

    @override
    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        if self._asked:
            self._withdraw()
        if not self._is_time():  # Ray's loop does not pause while there is no group
            time.sleep(_SECONDS_BETWEEN_LOOKS / 10)
            return NoopDecision()
        self._avoided = draining() | unreachable()
        self._look_at_demand(running=0)
        return super().make_decision_for_non_running_worker_group()

    @override
    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._look_at_demand(running=worker_group_state.num_workers)
        if self._asked is None:
            self._asked = self._reason_to_halt(worker_group_state, worker_group_status)
            self._deadline = time.monotonic() + self._grace_seconds
        if self._asked is None:
            return NoopDecision()
        if not self._call("has_halted") and time.monotonic() < self._deadline:
            self._call("ask", self._asked)  # again: who was asked may have died
            return NoopDecision()
        return self._resize()

    def _reason_to_halt(self, group: Any, status: Any) -> ControlSignal | None:
        """What to ask of the workers where their number or their nodes are to change."""
        self._own_nodes = frozenset(worker.metadata.node_id for worker in group.workers)
        self._avoided = draining()
        if leaving := self._avoided & self._own_nodes:
            return self._make_way(leaving) if self._is_time() else None
        decision = super().make_decision_for_running_worker_group(group, status)
        if not isinstance(decision, ResizeDecision):
            return None
        count = min(decision.num_workers, group.num_workers + self._free())
        count -= count % self._multiple
        if count == group.num_workers:
            return None
        text = f"{group.num_workers} -> {count} workers"
        return ControlSignal(action=Action.HALT, reason="resize", text=text)

    def _make_way(self, leaving: frozenset[str]) -> ControlSignal | None:
        """Halts for a group on other nodes where there is room for one; else has the workers save
        once, and looks again."""
        text = f"{len(leaving)} node{'s' * (len(leaving) > 1)} to go"
        if self._possible() >= self.scaling_config.min_workers:
            return ControlSignal(action=Action.HALT, reason="drain", text=text)
        if leaving - self._warned_of:
            self._call("ask", ControlSignal(action=Action.SAVE, reason="drain", text=text))
            self._warned_of |= leaving
        return None

    def _resize(self) -> ScalingDecision:
        """A new group of whatever size there is room for now; none until there is enough."""
        count = self._possible()
        if count < self.scaling_config.min_workers:
            return NoopDecision()
        self._withdraw()
        return self._get_resize_decision(count)

    def _withdraw(self) -> None:
        self._asked = None
        self._call("withdraw", Action.HALT)

    def _is_time(self) -> bool:
        """Whether the last look at the whole cluster is some time ago; then a new one begins."""
        now = time.monotonic()
        if now - self._looked < _SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = now
        return True

    def _possible(self) -> int:
        """The workers there is room for, from a fresh view of the cluster."""
        self._avoided = draining() | unreachable()
        self._send_resource_request()  # type: ignore[no-untyped-call]
        self._latest_reserved_resources_query_time = float("-inf")
        reserved = self._get_reserved_resources()
        return self._count_possible_workers(reserved) if reserved else 0

    def _free(self) -> int:
        """More workers that fit beside all that runs: others than Ray Train's may hold resources,
        and the reservation does not know of them."""
        avoided = self._avoided | unreachable()
        return sum(self._room(r) for node, r in free_resources().items() if node not in avoided)

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
        """As many as the autoscaler may ever grant. Without one: the most workers, and once more
        those that the run's own nodes about to go have room for: else Ray might reserve room on
        these alone. At most twice as many."""
        return self._wanted() if self._demanded is None else self._demanded

    def _wanted(self) -> int:
        leaving = self._avoided & self._own_nodes
        room = sum(self._room(n["Resources"]) for n in nodes() if n["NodeID"] in leaving)
        return self.scaling_config.max_workers + min(room, self.scaling_config.max_workers)

    def _look_at_demand(self, running: int) -> None:
        """Asks for another number of workers where the autoscaler refuses what was asked."""
        now = time.monotonic()
        if now - self._demand_looked < _SECONDS_BETWEEN_LOOKS:
            return
        self._demand_looked = now
        if not launches_nodes():
            return
        before = self._demanded
        self._demanded = self._demand.workers(
            self._wanted(),
            have=max(running, self._reserved_count),
            is_refused=refuses(),
            now=now,
        )
        if self._demanded != before:
            self._send_resource_request()  # type: ignore[no-untyped-call]

    @override
    def _count_possible_workers(self, reserved_resources: Any) -> int:
        staying = [r for node, r in reserved_resources.items() if node not in self._avoided]
        count = min(sum(map(self._room, staying)), self.scaling_config.max_workers)
        self._reserved_count = count
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
        """Calls the channel; one that does not answer is one that halts nobody."""
        try:
            return ray.get(
                getattr(self._channel, method).remote(*arguments), timeout=_SECONDS_TO_ANSWER
            )
        except ray.exceptions.RayError:
            return None
