"""Scaling policy: resizes the group of workers only after its state has been saved.

Ray's own elastic policy kills the workers in the middle of a step. This one asks them through the
control channel to save their state and halt, and resizes once they have. It also detects nodes that
are being drained (`ray drain-node`, a spot machine's notice) before they are gone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import ray
from typing_extensions import override

from elastrata.cluster.channel import send_event
from elastrata.cluster.leaked_placement_groups import note_controller
from elastrata.cluster.nodes import (
    autoscaler_refuses,
    draining_node_ids,
    has_autoscaler,
    list_nodes,
    peaks_by_node,
    selector_excluding,
    selector_for,
    unreachable_node_ids,
)
from elastrata.cluster.ray_internals import free_resources
from elastrata.cluster.ray_train_internals import (
    ControllerCallback,
    NoopDecision,
    ResizeDecision,
    ScalingConfig,
    ScalingDecision,
    TrainAutoscalingCoordinatorClient,
    TrainRunContext,
    get_or_create_autoscaling_coordinator,
)
from elastrata.cluster.scaling_machine import (
    CapacityObserved,
    ControllerStarted,
    Demand,
    DemandObserved,
    GroupRuns,
    HaltObserved,
    Instruction,
    NodesObserved,
    NoGroup,
    Observation,
    Observe,
    Pause,
    Resize,
    ScalingEvent,
    ScalingMachine,
    Signal,
    SizeProposed,
    StartGroup,
    Withdraw,
    count_in_whole_groups,
    place_workers,
    sort_by_speed,
)
from elastrata.cluster.staying_workers import WorkerPlaces
from elastrata.step.events import Action, Warned

_SECONDS_TO_ANSWER = 5.0
_SECONDS_BETWEEN_QUERIES = 1.0
_RETRY_SECONDS = (45.0, 90.0)
"""Range of the time until a run repeats a request that an autoscaler refused; random for each
run."""
_ROUNDING = 1e-6
"""Tolerance when dividing resources: three workers of 0.4 CPUs fit into 1.2."""


# It has the methods that the controller calls, but not Ray's `ScalingPolicy` as a base: those bases
# give access to their resource requests only through underscore members.
class GracefulScalingPolicy(ControllerCallback):
    """Policy that decides the number of workers in Ray Train's controller.

    It feeds a `ScalingMachine` and carries out its instructions.

    Args:
        scaling: bounds on the number of workers, and the interval at which growth is considered.
        channel: handle of the control channel to the workers.
        run: name under which Ray reserves resources.
        multiple: the number of workers is a multiple of this; the remainder stays idle.
        grace_seconds: time for the workers to save their state before they are stopped.
        slow: finds slow nodes to exclude; None excludes none.
        tensor: workers per tensor group. A group is placed on one node if one has room for it.
        peaks: FLOP/s by GPU family, if ranks are ordered by the speed of their nodes.
        fastest_first: with `peaks`: True to give the first ranks the fastest nodes.
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
        self.scaling_config = scaling
        resources: Any = scaling.resources_per_worker
        self._resources: dict[str, float] = dict(resources or {})
        self._channel = channel
        # A controller that replaces a dead one takes over the reservations of the same name. Under
        # another name they would block the resources for three minutes.
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
        self._avoided: frozenset[str] = frozenset()
        self._own_nodes: frozenset[str] = frozenset()
        self._demanded: int | None = None
        self._reserved: Any = None
        self._reserved_at = self._considered_at = float("-inf")
        self._reserved_count = 0
        self._tensor, self._peaks, self._fastest_first = tensor, peaks, fastest_first
        self._was_placed = False
        self._proposed: SizeProposed | None = None
        self._client: Any = None
        self._scaling_of_run: Any = None

    @override
    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        note_controller(self._run)
        self._scaling_of_run = train_run_context.scaling_config
        self._client = TrainAutoscalingCoordinatorClient(self._run)
        self._request_room()
        self._feed(ControllerStarted())

    @override
    async def before_controller_shutdown(self) -> None:
        self.before_controller_abort()

    @override
    def before_controller_abort(self) -> None:
        if self._client:
            self._client.cancel_resource_request()

    @property
    def avoided_nodes(self) -> frozenset[str]:
        """Ids of the nodes that get no workers, as of the newest decision."""
        return self._avoided

    @property
    def places_by_rules(self) -> bool:
        """True if it matters which worker is on which node."""
        return self._tensor > 1 or bool(self._peaks)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Return the size of a group to start, if there is room for one. Called by Ray Train."""
        self._group = self._proposed = None
        return self._feed(NoGroup()) or NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Return another size for the group, once its workers have halted. Called by Ray Train."""
        self._group, self._was_placed = worker_group_state, False
        return self._feed(GroupRuns()) or NoopDecision()

    def _feed(self, event: ScalingEvent) -> ScalingDecision | None:
        """Pass an event to the machine, carry out its instructions and return the last decision."""
        decision: ScalingDecision | None = None
        for instruction in self._machine.handle(event, time.monotonic()):
            decision = self._carry_out(instruction) or decision
        return decision

    def _carry_out(self, instruction: Instruction) -> ScalingDecision | None:
        match instruction:
            case Observe():
                answer = self._look(instruction)
                return self._feed(answer) if answer else None
            case Signal(signal):
                self._call("ask", signal)
            case Withdraw():
                self._call("withdraw", Action.HALT)
            case Demand(workers):
                self._demanded = workers
                self._request_room()
            case Resize(workers):
                return self._resize(workers)
            case StartGroup():
                count = self._count_reserved()
                # Too few resources yet: the machine tries again.
                if count is None or count < self.scaling_config.min_workers:
                    return None
                return self._resize(count)
            case Pause(seconds):
                time.sleep(seconds)
        return None

    def _look(self, look: Observe) -> Observation | None:
        match look:
            case Observe.CLUSTER:
                self._avoided = self._exclude_slow(draining_node_ids() | unreachable_node_ids())
                return None
            case Observe.NODES:
                own_nodes = {worker.metadata.node_id for worker in self._group.workers}
                self._own_nodes, leaving = frozenset(own_nodes), draining_node_ids()
                # Slowness alone does not end a running group: its slow nodes stay until the next
                # resize.
                self._avoided = leaving | (self._exclude_slow(leaving) - self._own_nodes)
                return NodesObserved(leaving & self._own_nodes)
            case Observe.SIZE:
                return self._propose_size()
            case Observe.ROOM:
                return CapacityObserved(self._count_possible_now())
            case Observe.HALT:
                return HaltObserved(bool(self._call("has_halted")))
            case Observe.DEMAND:
                return self._demand()

    def _propose_size(self) -> SizeProposed | None:
        """Return another size for the group; None while its newcomers have yet to start."""
        if self._proposed is None:
            have, num_wanted = self._group.num_workers, self._consider_size()
            if num_wanted in (None, have) or num_wanted < self.scaling_config.min_workers:
                return None
            self._proposed = SizeProposed(have, num_wanted, self._count_free())
        if self._is_awaiting_newcomers(self._proposed):
            return None
        proposed, self._proposed = self._proposed, None
        return proposed

    def _consider_size(self) -> int | None:
        """Return the number of workers that fit; None if that was considered less than one monitor
        interval ago."""
        now = time.monotonic()
        since = max(self._group.start_time, self._considered_at)
        if now - since < self.scaling_config.elastic_resize_monitor_interval_s:
            return None
        # Not `_reserved_at`: reservations are queried more often than resizes are considered.
        self._considered_at = now
        return self._count_reserved()

    def _is_awaiting_newcomers(self, size: SizeProposed) -> bool:
        """Start the newcomers of a larger group; return True until all have started. Return False
        at once if workers do not stay: newcomers start after the others have halted."""
        more = min(size.proposed - size.workers, size.free)
        more -= more % self._multiple
        places = self._group.placement_group_handle
        if more <= 0 or not isinstance(places, WorkerPlaces) or self.places_by_rules:
            return False
        have_started = places.prepare(more, selector_excluding(self._avoided))
        if have_started is None:
            self._proposed = None
        return not have_started

    def _demand(self) -> DemandObserved | None:
        if not has_autoscaler():
            return None
        running = self._group.num_workers if self._group else 0
        return DemandObserved(
            most=self._num_wanted(),
            have=max(running, self._reserved_count),
            is_refused=autoscaler_refuses(),
        )

    def _count_possible_now(self) -> int:
        """Return the number of workers that fit, from a fresh view of the cluster."""
        self._avoided = self._exclude_slow(draining_node_ids() | unreachable_node_ids())
        self._request_room()
        self._reserved_at = float("-inf")
        return self._count_reserved() or 0

    def _exclude_slow(self, avoided: frozenset[str]) -> frozenset[str]:
        """Return these nodes and the slow ones, or only these nodes if otherwise fewer than the
        minimum of workers would fit."""
        slow = self._slow.nodes() - avoided if self._slow else frozenset()
        if not slow:
            return avoided
        staying = [n for n in list_nodes() if n["Alive"] and n["NodeID"] not in avoided | slow]
        room = sum(self._room(node["Resources"]) for node in staying)
        return avoided if room < self.scaling_config.min_workers else avoided | slow

    def _count_free(self) -> int:
        """Return the number of additional workers that fit into unclaimed resources."""
        avoided = self._avoided | unreachable_node_ids()
        # The reservation covers Ray Train alone; other tasks and actors may hold resources.
        return sum(self._room(r) for node, r in free_resources().items() if node not in avoided)

    def _request_room(self) -> None:
        """Reserve resources for the number of workers that the run requests."""
        # Ray might reserve the run's own draining nodes alone, so their workers are requested
        # twice.
        self._client.send_resource_request(self.scaling_config, self._num_requested())

    def _num_requested(self) -> int:
        return self._num_wanted() if self._demanded is None else self._demanded

    def _count_reserved(self) -> int | None:
        """Return the number of workers that fit into the reservation; None if Ray does not
        answer."""
        self._client.maybe_send_resource_request(self.scaling_config, self._num_requested())
        reserved = self._reserved_resources()
        return None if reserved is None else self.count_possible(reserved)

    def _reserved_resources(self) -> Any:
        now = time.monotonic()
        if now - self._reserved_at < _SECONDS_BETWEEN_QUERIES:
            return self._reserved
        coordinator: Any = get_or_create_autoscaling_coordinator()  # type: ignore[no-untyped-call]
        # Without `recompute` a node that died less than 20 s ago is still counted on.
        call = coordinator.get_reserved_resources.remote(self._run, recompute=True)
        try:
            self._reserved = ray.get(call, timeout=_SECONDS_TO_ANSWER)
        except ray.exceptions.RayError:
            self._reserved = None
        self._reserved_at = time.monotonic()
        return self._reserved

    def _num_wanted(self) -> int:
        """Return the most workers, plus those on the run's own nodes that are leaving."""
        leaving = self._avoided & self._own_nodes
        room = sum(self._room(n["Resources"]) for n in list_nodes() if n["NodeID"] in leaving)
        return self.scaling_config.max_workers + min(room, self.scaling_config.max_workers)

    def count_possible(self, reserved: Mapping[str, Mapping[str, float]]) -> int:
        """Return the number of workers that fit into reserved resources, by node, in whole
        groups."""
        staying = [r for node, r in reserved.items() if node not in self._avoided]
        rooms = [self._room(resources) for resources in staying]
        count = count_in_whole_groups(rooms, self._tensor)
        # Split groups are slower, but better than no training.
        if count < max(self.scaling_config.min_workers, self._multiple):
            count = sum(rooms)
        count = min(count, self.scaling_config.max_workers)
        self._reserved_count = count
        return count - count % self._multiple

    @override
    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        """Set the label selectors that keep workers off nodes whose loss Ray has not noticed."""
        # The hook that Ray has for this takes one selector for all workers; only the scaling
        # configuration of the run takes a list, and it is read after this.
        self._scaling_of_run.label_selector = self._selectors(resize_decision.num_workers)

    def _selectors(self, num_workers: int) -> list[dict[str, str]] | None:
        """Return the label selector of each worker; None if any node will do."""
        # If a group with a node per worker did not start, the next try leaves the placement to Ray.
        if self.places_by_rules and not self._was_placed:
            nodes_by_rank = self._place_workers(num_workers)
            self._was_placed = nodes_by_rank is not None
            if nodes_by_rank:
                return [selector_for(node) for node in nodes_by_rank]
        self._was_placed = False
        selector = selector_excluding(self._avoided)
        return [selector] * num_workers if selector else None

    def _place_workers(self, num_workers: int) -> list[str] | None:
        """Return the node of each worker, in the order of ranks; None if not all workers fit."""
        reserved = self._reserved_resources() or {}
        rooms = {
            node: self._room(resources)
            for node, resources in reserved.items()
            if node not in self._avoided
        }
        peaks = peaks_by_node(self._peaks) if self._peaks else {}
        ordered = sort_by_speed(rooms, peaks, fastest_first=self._fastest_first)
        return place_workers(ordered, num_workers, self._tensor)

    def _room(self, resources: Mapping[str, float]) -> int:
        """Return the number of workers that fit into the resources of one node."""
        fitting = [
            (resources.get(name, 0.0) + _ROUNDING) // amount
            for name, amount in self._resources.items()
            if amount > 0
        ]
        return int(min(fitting, default=self.scaling_config.max_workers))

    def _resize(self, workers: int) -> ResizeDecision:
        return ResizeDecision(workers, self._resources)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the channel; return None if the channel does not answer."""
        try:
            return ray.get(
                getattr(self._channel, method).remote(*arguments), timeout=_SECONDS_TO_ANSWER
            )
        except ray.exceptions.RayError:
            return None


class SlowNodes:
    """Slow nodes as measured by the control channel; newly found ones are reported.

    Args:
        channel: handle of the control channel.
        limit: nodes with a worker below this share of its kind's speed are slow.
    """

    def __init__(self, channel: Any, limit: float) -> None:
        self._channel, self._limit = channel, limit
        self._known: frozenset[str] = frozenset()

    def nodes(self) -> frozenset[str]:
        """Return the ids of the slow nodes; the last known ones if the channel does not answer."""
        try:
            call = self._channel.slow_nodes.remote()
            factors: Mapping[str, float] = ray.get(call, timeout=_SECONDS_TO_ANSWER)
        except ray.exceptions.RayError:
            return self._known
        slow = {node: factor for node, factor in factors.items() if factor < self._limit}
        for node in slow.keys() - self._known:
            text = (
                f"node {node} has a worker at {slow[node]:.2f} of its kind's speed, below "
                f"workers.exclude_slower_than ({self._limit:g}): left out from the next resize on "
                "if enough workers fit elsewhere"
            )
            send_event(self._channel, Warned(text=text))
        self._known = frozenset(slow)
        return self._known
