"""The number of workers of a run and their nodes: decisions from the state of the cluster.

`ScalingMachine` takes events and returns instructions; a `Look` instruction is answered with an
event. `place` takes the number of workers that fit on each node and returns the node of each
worker. This module does not import Ray and reads no clock: `scaling_policy.py` feeds it and carries
out its instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from elastrata.step.events import Action, ControlSignal
from elastrata_pipelines.errors import pluralize

# A check opens a connection to every node.
SECONDS_BETWEEN_LOOKS = 1.0
"""Shortest time between two checks of the whole cluster."""
# Ray's autoscaler updates its status every 5 s.
SECONDS_TO_JUDGE = 12.0
"""Time from a new demand to an autoscaler status that reflects it."""
_PAUSE_SECONDS = SECONDS_BETWEEN_LOOKS / 10


@dataclass(frozen=True)
class ControllerStarted:
    """A Ray Train controller has started."""


@dataclass(frozen=True)
class NoGroup:
    """The run has no group of workers."""


@dataclass(frozen=True)
class GroupRuns:
    """A group of workers trains."""


@dataclass(frozen=True)
class NodesObserved:
    """The answer to `Look.NODES`."""

    leaving: frozenset[str]
    """Ids of the group's nodes that are being drained."""


@dataclass(frozen=True)
class SizeProposed:
    """The answer to `Look.SIZE` if the reservation fits another number of workers."""

    workers: int
    """Workers of the present group."""
    proposed: int
    """Workers that fit into the reserved resources."""
    free: int
    """Additional workers that fit into unclaimed resources."""


@dataclass(frozen=True)
class CapacityObserved:
    """The answer to `Look.ROOM`."""

    workers: int
    """Workers that fit, in whole groups, on nodes that stay."""


@dataclass(frozen=True)
class HaltObserved:
    """The answer to `Look.HALT`."""

    has_halted: bool
    """True once the workers have saved their state and take no more steps."""


@dataclass(frozen=True)
class DemandObserved:
    """The answer to `Look.DEMAND` if an autoscaler launches the cluster's nodes."""

    most: int
    """Most workers that the run can use."""
    have: int
    """Workers that run, or that fit into the resources reserved now."""
    is_refused: bool
    """True if the autoscaler reports that it cannot meet the request."""


class Observe(Enum):
    """An instruction to inspect the cluster."""

    CLUSTER = "which nodes are leaving or do not answer"
    NODES = "which nodes of the group are leaving"
    SIZE = "whether another number of workers fits"
    ROOM = "how many workers fit, from a fresh view of the cluster"
    HALT = "whether the workers have halted"
    DEMAND = "whether the autoscaler refuses the request"


@dataclass(frozen=True)
class Signal:
    """An instruction to send a control signal to the workers."""

    signal: ControlSignal


@dataclass(frozen=True)
class Withdraw:
    """An instruction to withdraw a request to halt."""


@dataclass(frozen=True)
class Demand:
    """An instruction to request resources for this many workers from the autoscaler."""

    workers: int


@dataclass(frozen=True)
class Resize:
    """An instruction to end the group and start one of this many workers."""

    workers: int


@dataclass(frozen=True)
class StartGroup:
    """An instruction to start a group on all reserved resources of nodes that answer."""


@dataclass(frozen=True)
class Pause:
    """An instruction to sleep."""

    seconds: float


Observation = NodesObserved | SizeProposed | CapacityObserved | HaltObserved | DemandObserved
"""The events that answer a `Look`."""
ScalingEvent = ControllerStarted | NoGroup | GroupRuns | Observation
Instruction = Observe | Signal | Withdraw | Demand | Resize | StartGroup | Pause


class ScalingMachine:
    """State machine that decides the size of one controller's groups of workers.

    Args:
        least: fewest workers that the run can use.
        multiple: the number of workers is a multiple of this.
        grace_seconds: time for the workers to save their state before they are stopped.
        retry_seconds: time after which a refusal of the autoscaler expires. It differs between
            runs, so that they do not retry simultaneously.
    """

    def __init__(
        self, *, least: int, multiple: int, grace_seconds: float, retry_seconds: float
    ) -> None:
        self._least, self._multiple = least, multiple
        self._grace_seconds = grace_seconds
        self._demands = _Demands(least, retry_seconds)
        self._halt: ControlSignal | None = None
        self._deadline = 0.0
        self._leaving: frozenset[str] = frozenset()
        self._warned_nodes: frozenset[str] = frozenset()
        self._checked_at = self._demand_checked_at = float("-inf")

    def handle(self, event: ScalingEvent, now: float) -> list[Instruction]:
        """Take an event and return the instructions that follow from it.

        Args:
            event: a change of the run, or the answer to a `Look`.
            now: time of a monotonic clock, in seconds.

        Returns:
            Instructions, to be carried out in this order. The events that answer one are handled
            before the next one.
        """
        match event:
            case ControllerStarted():
                # A previous controller may have left a request to halt in the channel.
                return self._withdraw()
            case NoGroup():
                return self._handle_no_group(now)
            case GroupRuns():
                look = Observe.HALT if self._halt else Observe.NODES
                return [*self._look_at_demand(now), look]
            case NodesObserved():
                return self._handle_nodes(event.leaving, now)
            case SizeProposed():
                return self._handle_size(event, now)
            case CapacityObserved():
                return self._handle_room(event.workers, now)
            case HaltObserved():
                return self._handle_halt(event.has_halted, now)
            case DemandObserved():
                return self._demands.handle(event, now)

    def _handle_no_group(self, now: float) -> list[Instruction]:
        withdrawal = self._withdraw() if self._halt else []
        if not self._begin_check(now):  # Ray's loop does not pause while there is no group
            return [*withdrawal, Pause(_PAUSE_SECONDS)]
        return [*withdrawal, Observe.CLUSTER, *self._look_at_demand(now), StartGroup()]

    def _handle_nodes(self, leaving: frozenset[str], now: float) -> list[Instruction]:
        self._leaving = leaving
        if not leaving:
            return [Observe.SIZE]
        return [Observe.ROOM] if self._begin_check(now) else []

    def _handle_size(self, event: SizeProposed, now: float) -> list[Instruction]:
        # Others than Ray Train may hold a part of the reserved resources.
        count = min(event.proposed, event.workers + event.free)
        count -= count % self._multiple
        if count == event.workers:
            return []
        return self._ask_to_halt("resize", f"{event.workers} -> {pluralize(count, 'worker')}", now)

    def _handle_room(self, workers: int, now: float) -> list[Instruction]:
        if self._halt is None:
            return self._leave_nodes(workers, now)
        # Too little room for any group: keep waiting, as nodes may join or become free.
        if workers < self._least:
            return []
        return [*self._withdraw(), Resize(workers)]

    def _leave_nodes(self, room: int, now: float) -> list[Instruction]:
        """Request a halt if another group fits on other nodes; otherwise request one save per
        leaving node and check again later."""
        leaving = self._leaving
        text = f"{pluralize(len(leaving), 'node')} to go"
        if room >= self._least:
            return self._ask_to_halt("drain", text, now)
        if not leaving - self._warned_nodes:
            return []
        self._warned_nodes |= leaving
        return [Signal(ControlSignal(action=Action.SAVE, reason="drain", text=text))]

    def _ask_to_halt(self, reason: str, text: str, now: float) -> list[Instruction]:
        self._halt = ControlSignal(action=Action.HALT, reason=reason, text=text)
        self._deadline = now + self._grace_seconds
        return [Observe.HALT]

    def _handle_halt(self, has_halted: bool, now: float) -> list[Instruction]:
        if self._halt and not has_halted and now < self._deadline:
            # Repeated: the process that received it may have died.
            return [Signal(self._halt)]
        return [Observe.ROOM]

    def _withdraw(self) -> list[Instruction]:
        self._halt = None
        return [Withdraw()]

    def _begin_check(self, now: float) -> bool:
        """Return True, and start a new interval, if the last check of the whole cluster is at least
        `SECONDS_BETWEEN_LOOKS` ago."""
        if now - self._checked_at < SECONDS_BETWEEN_LOOKS:
            return False
        self._checked_at = now
        return True

    def _look_at_demand(self, now: float) -> list[Instruction]:
        if now - self._demand_checked_at < SECONDS_BETWEEN_LOOKS:
            return []
        self._demand_checked_at = now
        return [Observe.DEMAND]


# Ray's autoscaler launches no node at all if a request exceeds what its cluster may ever have, or
# if the requests of several runs do so together. So a refused run has to ask for less.
class _Demands:
    """The number of workers that one run requests from the autoscaler; never fewer than it has.

    A run whose request is refused finds by bisection how many workers it can get. A run that is
    refused even `least` workers requests no more than it has until `retry_seconds` have passed.
    """

    def __init__(self, least: int, retry_seconds: float) -> None:
        self._least = least
        self._retry_seconds = retry_seconds
        self._demanded: int | None = None
        self._demanded_at = self._refused_at = float("-inf")
        self._refused: int | None = None

    def handle(self, event: DemandObserved, now: float) -> list[Instruction]:
        waited = now - self._demanded_at
        demanded = self._demanded or 0
        # Earlier, the autoscaler's status may be about the previous demand.
        if event.is_refused and demanded > event.have and waited >= SECONDS_TO_JUDGE:
            self._refused, self._refused_at = demanded, now
        elif now - self._refused_at >= self._retry_seconds:
            self._refused = None
        count = self._next_count(event.most, event.have)
        if count == self._demanded:
            return []
        self._demanded, self._demanded_at = count, now
        return [Demand(count)]

    def _next_count(self, most: int, have: int) -> int:
        """Return the next number to request: half-way between the present and the refused one."""
        if have >= most or self._refused is None:
            return most
        if self._refused <= self._least:
            return have
        return min(most, max(self._least, have, (have + self._refused) // 2))


# Ray numbers workers node by node, in the order in which their places were requested. So the order
# of nodes is the order of ranks, and neighbours share a pipeline stage or have adjacent ones.


def place_workers(rooms: Mapping[str, int], workers: int, tensor: int) -> list[str] | None:
    """Return the node of each worker, in the order of ranks; None if not all workers fit.

    Whole tensor groups are placed first, node by node. The remaining workers fill the rest of each
    node and come last, so that few groups are split over nodes.

    Args:
        rooms: number of workers that fit on each node; nodes in front are filled first.
        workers: number of workers to place, a multiple of `tensor`.
        tensor: workers per tensor group.
    """
    whole_rooms = {node: room - room % tensor for node, room in rooms.items()}
    if sum(rooms.values()) < workers:
        return None
    in_groups = _fill_nodes(whole_rooms, workers)
    remaining = workers - sum(in_groups.values())
    left_over = _fill_nodes({node: rooms[node] - whole_rooms[node] for node in rooms}, remaining)
    counts = {node: in_groups[node] + left_over[node] for node in rooms}
    even = [node for node in rooms if not left_over[node]]
    order = [*even, *(node for node in rooms if left_over[node])]
    return [node for node in order for _ in range(counts[node])]


def count_in_whole_groups(rooms: Sequence[int], tensor: int) -> int:
    """Return how many workers fit in tensor groups that are each on a single node."""
    return sum(room - room % tensor for room in rooms)


def count_split_groups(nodes: Sequence[str], tensor: int) -> int:
    """Return the number of tensor groups whose workers are on several nodes.

    Args:
        nodes: the node of each rank.
        tensor: workers per tensor group; their ranks are consecutive.
    """
    groups = (nodes[first : first + tensor] for first in range(0, len(nodes), tensor))
    return sum(len(set(group)) > 1 for group in groups)


def sort_by_speed(
    rooms: Mapping[str, int], peaks: Mapping[str, float], *, fastest_first: bool
) -> dict[str, int]:
    """Return the nodes sorted by the speed of their devices, then with the largest room first.

    Args:
        rooms: number of workers that fit on each node.
        peaks: peak FLOP/s by node; nodes without an entry count as equally fast.
        fastest_first: True to sort the fastest nodes first, False to sort them last.
    """
    sign = -1 if fastest_first else 1
    order = sorted(rooms, key=lambda node: (sign * peaks.get(node, 0.0), -rooms[node], node))
    return {node: rooms[node] for node in order}


def split_groups_warning(nodes: Sequence[str], tensor: int) -> str:
    """Return a warning about tensor groups that are split over nodes; empty if none is."""
    num_split = count_split_groups(nodes, tensor)
    if not num_split:
        return ""
    return (
        f"parallel.tensor: {tensor}: {num_split} of {len(nodes) // tensor} groups have workers on "
        "several nodes, and talk over the network in every block; a node with room for a multiple "
        f"of {pluralize(tensor, 'worker')} has whole groups"
    )


def _fill_nodes(rooms: Mapping[str, int], workers: int) -> dict[str, int]:
    """Return the number of workers on each node if nodes in front are filled first."""
    counts = {}
    for node, room in rooms.items():
        counts[node] = min(room, workers)
        workers -= counts[node]
    return counts
