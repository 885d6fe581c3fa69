"""When the group of workers changes its size: not before its state is safe.

Ray's own elastic policy kills the workers in the middle of a step. This one asks them, through the
channel, to save their state and halt, and resizes when they have. It also sees nodes that are about
to go (`ray drain-node`, a spot machine's notice) before they are gone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from typing_extensions import override

from elastrata.cluster.leaked_placement_groups import note_controller
from elastrata.cluster.nodes import (
    draining,
    elsewhere,
    launches_nodes,
    nodes,
    only_on,
    peaks_by_node,
    refuses,
    unreachable,
)
from elastrata.cluster.placement import in_order, in_whole_groups, place
from elastrata.cluster.ray_internals import free_resources
from elastrata.cluster.ray_train_internals import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingConfig,
    ScalingDecision,
    TrainAutoscalingCoordinatorClient,
    TrainRunContext,
    label_selectors,
)
from elastrata.cluster.scaling_machine import (
    ControllerStarted,
    Demand,
    DemandSeen,
    GroupRuns,
    HaltSeen,
    Instruction,
    Look,
    NodesSeen,
    NoGroup,
    Pause,
    Resize,
    RoomSeen,
    ScalingEvent,
    ScalingMachine,
    Seen,
    Signal,
    SizeProposed,
    StartGroup,
    Withdraw,
)
from elastrata.cluster.slow_nodes import SlowNodes
from elastrata.core.events import Action

_SECONDS_TO_ANSWER = 5.0
_RETRY_SECONDS = (45.0, 90.0)
"""Until a run asks again for what an autoscaler refused; drawn for each run."""
_ROUNDING = 1e-6
"""Ray adds up fractions of a CPU; three workers of 0.4 need no more than 1.2."""


class GracefulScalingPolicy(ElasticScalingPolicy):
    """Decides the number of workers, between the recipe's bounds, in Ray Train's controller: feeds
    a `ScalingMachine` and carries out what it says.

    Args:
        scaling: with the bounds, and how often a resize upward is considered.
        channel: to ask the workers through.
        run: what Ray's reservations are for. A controller that follows one that died takes them
            over; another name's would bar it from these resources for three minutes.
        multiple: workers come in whole numbers of so many; what is left over waits as spares.
        grace_seconds: how long the workers may take to save their state.
        slow: the nodes that are to be left out, where any are.
        tensor: so many neighbours talk in every block: they are placed on one node, where one has
            room.
        peaks: FLOP/s by family of GPUs, where ranks go by the speed of their nodes; default: they
            do not.
        fastest_first: the order of ranks then.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        channel: Any,
        *,
        run: str,
        multiple: int,
        grace_seconds: float,
        slow: SlowNodes | None = None,
        tensor: int = 1,
        peaks: Mapping[str, float] | None = None,
        fastest_first: bool = True,
    ) -> None:
        super().__init__(scaling)
        self._channel = channel
        self._run = run
        self._multiple = multiple
        self._slow = slow
        self._machine = ScalingMachine(
            least=scaling.min_workers,
            multiple=multiple,
            grace_seconds=grace_seconds,
            retry_seconds=random.uniform(*_RETRY_SECONDS),
        )
        self._group: Any = None
        self._status: Any = None
        self._avoided: frozenset[str] = frozenset()
        self._own_nodes: frozenset[str] = frozenset()
        self._demanded: int | None = None
        self._reserved_count = 0
        self._tensor, self._peaks, self._fastest_first = tensor, peaks, fastest_first
        self._was_placed = False
        self._proposed: SizeProposed | None = None
        self.prepare: Callable[[int, Mapping[str, str] | None], bool | None] | None = None
        """Starts so many more workers on such nodes; returns whether they are there, or None where
        there is no room for them. Without it newcomers start when the others have halted."""

    @override
    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        note_controller(self._run)
        self._requester_id = self._run
        self._coordinator_client = TrainAutoscalingCoordinatorClient(self._run)
        self._send_resource_request()  # type: ignore[no-untyped-call]
        self._feed(ControllerStarted())

    @property
    def avoided(self) -> frozenset[str]:
        """Ids of the nodes that workers keep off, as of the newest decision."""
        return self._avoided

    @property
    def places_by_rules(self) -> bool:
        """Whether it matters which worker is on which node."""
        return self._tensor > 1 or bool(self._peaks)

    @override
    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._group = self._status = self._proposed = None
        return self._feed(NoGroup()) or NoopDecision()

    @override
    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._group, self._status = worker_group_state, worker_group_status
        self._was_placed = False
        return self._feed(GroupRuns()) or NoopDecision()

    def _feed(self, event: ScalingEvent) -> ScalingDecision | None:
        """Tells the machine of an event and carries out what it says; returns the decision that
        this comes to, if any."""
        decision: ScalingDecision | None = None
        for instruction in self._machine.handle(event, time.monotonic()):
            decision = self._carry_out(instruction) or decision
        return decision

    def _carry_out(self, instruction: Instruction) -> ScalingDecision | None:
        match instruction:
            case Look():
                seen = self._look(instruction)
                return self._feed(seen) if seen else None
            case Signal(signal):
                self._call("ask", signal)
            case Withdraw():
                self._call("withdraw", Action.HALT)
            case Demand(workers):
                self._demanded = workers
                self._send_resource_request()  # type: ignore[no-untyped-call]
            case Resize(workers):
                return self._get_resize_decision(workers)
            case StartGroup():
                return super().make_decision_for_non_running_worker_group()
            case Pause(seconds):
                time.sleep(seconds)
        return None

    def _look(self, look: Look) -> Seen | None:
        match look:
            case Look.CLUSTER:
                self._avoided = self._left_out(draining() | unreachable())
                return None
            case Look.NODES:
                own = {worker.metadata.node_id for worker in self._group.workers}
                self._own_nodes, leaving = frozenset(own), draining()
                self._avoided = leaving | (self._left_out(leaving) - self._own_nodes)
                return NodesSeen(leaving & self._own_nodes)
            case Look.SIZE:
                return self._proposal()
            case Look.ROOM:
                return RoomSeen(self._possible())
            case Look.HALT:
                return HaltSeen(bool(self._call("has_halted")))
            case Look.DEMAND:
                return self._demand()

    def _proposal(self) -> SizeProposed | None:
        """Another size, once the newcomers that it needs are there."""
        if self._proposed is None:
            decision = super().make_decision_for_running_worker_group(self._group, self._status)
            if not isinstance(decision, ResizeDecision):
                return None
            have, wanted = self._group.num_workers, decision.num_workers
            self._proposed = SizeProposed(have, wanted, self._free())
        if self._newcomers_are_awaited(self._proposed):
            return None
        proposed, self._proposed = self._proposed, None
        return proposed

    def _newcomers_are_awaited(self, size: SizeProposed) -> bool:
        more = min(size.proposed - size.workers, size.free)
        more -= more % self._multiple
        if more <= 0 or self.prepare is None or self.places_by_rules:
            return False
        are_there = self.prepare(more, elsewhere(self._avoided))
        if are_there is None:
            self._proposed = None
        return not are_there

    def _demand(self) -> DemandSeen | None:
        if not launches_nodes():
            return None
        running = self._group.num_workers if self._group else 0
        return DemandSeen(
            most=self._wanted(),
            have=max(running, self._reserved_count),
            is_refused=refuses(),
        )

    def _possible(self) -> int:
        """The workers there is room for, from a fresh view of the cluster."""
        self._avoided = self._left_out(draining() | unreachable())
        self._send_resource_request()  # type: ignore[no-untyped-call]
        self._latest_reserved_resources_query_time = float("-inf")
        reserved = self._get_reserved_resources()
        return self._count_possible_workers(reserved) if reserved else 0

    def _left_out(self, avoided: frozenset[str]) -> frozenset[str]:
        """These nodes and the slow ones; without those where too few workers were left."""
        slow = self._slow.nodes() - avoided if self._slow else frozenset()
        if not slow:
            return avoided
        staying = [n for n in nodes() if n["Alive"] and n["NodeID"] not in avoided | slow]
        room = sum(self._room(node["Resources"]) for node in staying)
        return avoided if room < self.scaling_config.min_workers else avoided | slow

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

    @override
    def _count_possible_workers(self, reserved_resources: Any) -> int:
        staying = [r for node, r in reserved_resources.items() if node not in self._avoided]
        rooms = [self._room(resources) for resources in staying]
        count = in_whole_groups(rooms, self._tensor)
        if count < max(self.scaling_config.min_workers, self._multiple):
            count = sum(rooms)
        count = min(count, self.scaling_config.max_workers)
        self._reserved_count = count
        return count - count % self._multiple

    @override
    def on_controller_start_worker_group(
        self, *, scaling_config: ScalingConfig, num_workers: int
    ) -> dict[str, str] | None:
        """Where the workers may be placed: Ray would take nodes that it has not yet missed. A group
        that did not start where each worker had its node is placed by Ray the next time."""
        if self.places_by_rules and not self._was_placed:
            placed = self._placed(num_workers)
            self._was_placed = placed is not None
            if placed:
                return label_selectors([only_on(node) for node in placed])
        self._was_placed = False
        return elsewhere(self._avoided)

    def _placed(self, num_workers: int) -> list[str] | None:
        """The node of each worker, in the order of ranks; None where there is no room for all."""
        reserved = self._get_reserved_resources() or {}
        rooms = {
            node: self._room(resources)
            for node, resources in reserved.items()
            if node not in self._avoided
        }
        peaks = peaks_by_node(self._peaks) if self._peaks else {}
        ordered = in_order(rooms, peaks, fastest_first=self._fastest_first)
        return place(ordered, num_workers, self._tensor)

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
