"""How many workers a run has, and on which nodes: decisions from what is known of the cluster.

`ScalingMachine` takes events and returns instructions; an instruction to look is answered with an
event. `place` takes the room on each node and returns the node of each worker. Nothing here knows
Ray or reads a clock: `scaling_policy.py` feeds it and carries out what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from elastrata.step.events import Action, ControlSignal

SECONDS_BETWEEN_LOOKS = 1.0
"""At the whole cluster: every node is asked for a connection."""
SECONDS_TO_JUDGE = 12.0
"""From a new demand to an answer that is about it: the autoscaler looks every five seconds."""
_PAUSE_SECONDS = SECONDS_BETWEEN_LOOKS / 10


@dataclass(frozen=True)
class ControllerStarted:
    """A controller has begun; one before it may have asked something of the workers."""


@dataclass(frozen=True)
class NoGroup:
    """There is no group of workers."""


@dataclass(frozen=True)
class GroupRuns:
    """A group of workers trains."""


@dataclass(frozen=True)
class NodesSeen:
    """Answers `Look.NODES`."""

    leaving: frozenset[str]
    """Ids of the group's nodes that are about to go."""


@dataclass(frozen=True)
class SizeProposed:
    """Answers `Look.SIZE`, where the reservation has room for another number of workers."""

    workers: int
    """Those of the group."""
    proposed: int
    free: int
    """More workers that fit beside all that runs."""


@dataclass(frozen=True)
class RoomSeen:
    """Answers `Look.ROOM`."""

    workers: int
    """There is room for, in whole groups, on nodes that stay."""


@dataclass(frozen=True)
class HaltSeen:
    """Answers `Look.HALT`."""

    has_halted: bool
    """Whether the workers have saved their state and take no more steps."""


@dataclass(frozen=True)
class DemandSeen:
    """Answers `Look.DEMAND`, where an autoscaler launches the cluster's nodes."""

    most: int
    """Workers that are of use."""
    have: int
    """Workers that there is room for now, or that run."""
    is_refused: bool
    """Whether the autoscaler refuses what is asked of it."""


class Look(Enum):
    """Has somebody look at the cluster."""

    CLUSTER = "which nodes are about to go, or do not answer"
    NODES = "which of the group's nodes are about to go"
    SIZE = "whether there is room for another number of workers"
    ROOM = "how many workers there is room for, from a fresh view of the cluster"
    HALT = "whether the workers have halted"
    DEMAND = "whether the autoscaler refuses what is asked of it"


@dataclass(frozen=True)
class Signal:
    """Asks something of the workers."""

    signal: ControlSignal


@dataclass(frozen=True)
class Withdraw:
    """Asks no halt of the workers any more."""


@dataclass(frozen=True)
class Demand:
    """Asks the autoscaler for room for so many workers."""

    workers: int


@dataclass(frozen=True)
class Resize:
    """Ends the group and starts one of so many workers."""

    workers: int


@dataclass(frozen=True)
class StartGroup:
    """Starts a group of as many workers as Ray has reserved room for, on nodes that answer."""


@dataclass(frozen=True)
class Pause:
    """Waits."""

    seconds: float


Seen = NodesSeen | SizeProposed | RoomSeen | HaltSeen | DemandSeen
"""The events that answer a look."""
ScalingEvent = ControllerStarted | NoGroup | GroupRuns | Seen
Instruction = Look | Signal | Withdraw | Demand | Resize | StartGroup | Pause


class ScalingMachine:
    """The decisions for one controller's groups of workers.

    Args:
        least: the fewest workers that are of use.
        multiple: workers come in whole numbers of so many.
        grace_seconds: how long the workers may take to save their state.
        retry_seconds: after which a refusal of the autoscaler is of old. Different for each run, so
            that they do not ask in step.
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
        self._warned_of: frozenset[str] = frozenset()
        self._looked = self._demand_looked = float("-inf")

    def handle(self, event: ScalingEvent, now: float) -> list[Instruction]:
        """Takes an event.

        Args:
            event: what has happened, or been seen.
            now: by a clock that never goes back, in seconds.

        Returns:
            What is to be done, in this order; before the rest, what comes of it.
        """
        match event:
            case ControllerStarted():
                return self._withdraw()
            case NoGroup():
                return self._without_group(now)
            case GroupRuns():
                look = Look.HALT if self._halt else Look.NODES
                return [*self._look_at_demand(now), look]
            case NodesSeen():
                return self._nodes_seen(event.leaving, now)
            case SizeProposed():
                return self._size_proposed(event, now)
            case RoomSeen():
                return self._room_seen(event.workers, now)
            case HaltSeen():
                return self._halt_seen(event.has_halted, now)
            case DemandSeen():
                return self._demands.handle(event, now)

    def _without_group(self, now: float) -> list[Instruction]:
        withdrawal = self._withdraw() if self._halt else []
        if not self._is_time(now):  # Ray's loop does not pause while there is no group
            return [*withdrawal, Pause(_PAUSE_SECONDS)]
        return [*withdrawal, Look.CLUSTER, *self._look_at_demand(now), StartGroup()]

    def _nodes_seen(self, leaving: frozenset[str], now: float) -> list[Instruction]:
        self._leaving = leaving
        if not leaving:
            return [Look.SIZE]
        return [Look.ROOM] if self._is_time(now) else []

    def _size_proposed(self, event: SizeProposed, now: float) -> list[Instruction]:
        count = min(event.proposed, event.workers + event.free)
        count -= count % self._multiple
        if count == event.workers:
            return []
        return self._ask_to_halt("resize", f"{event.workers} -> {count} workers", now)

    def _room_seen(self, workers: int, now: float) -> list[Instruction]:
        if self._halt is None:
            return self._make_way(workers, now)
        if workers < self._least:
            return []
        return [*self._withdraw(), Resize(workers)]

    def _make_way(self, room: int, now: float) -> list[Instruction]:
        """Halts for a group on other nodes where there is room for one; else has the workers save
        once, and looks again."""
        leaving = self._leaving
        text = f"{len(leaving)} node{'s' * (len(leaving) > 1)} to go"
        if room >= self._least:
            return self._ask_to_halt("drain", text, now)
        if not leaving - self._warned_of:
            return []
        self._warned_of |= leaving
        return [Signal(ControlSignal(action=Action.SAVE, reason="drain", text=text))]

    def _ask_to_halt(self, reason: str, text: str, now: float) -> list[Instruction]:
        self._halt = ControlSignal(action=Action.HALT, reason=reason, text=text)
        self._deadline = now + self._grace_seconds
        return [Look.HALT]

    def _halt_seen(self, has_halted: bool, now: float) -> list[Instruction]:
        if self._halt and not has_halted and now < self._deadline:
            return [Signal(self._halt)]  # again: who was asked may have died
        return [Look.ROOM]

    def _withdraw(self) -> list[Instruction]:
        self._halt = None
        return [Withdraw()]

    def _is_time(self, now: float) -> bool:
        """Whether the last look at the whole cluster is some time ago; then a new one begins."""
        if now - self._looked < SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = now
        return True

    def _look_at_demand(self, now: float) -> list[Instruction]:
        if now - self._demand_looked < SECONDS_BETWEEN_LOOKS:
            return []
        self._demand_looked = now
        return [Look.DEMAND]


class _Demands:
    """The workers that one run asks the autoscaler for; never less than it has.

    Ray's autoscaler launches nothing at all for a request beyond what its cluster may ever have,
    nor for the requests of several runs that are so together. So a run that is refused asks for
    fewer, and finds what it can have by halving; one that cannot have the least that it needs asks
    for nothing for a while.
    """

    def __init__(self, least: int, retry_seconds: float) -> None:
        self._least = least
        self._retry_seconds = retry_seconds
        self._demanded: int | None = None
        self._since = self._refused_at = float("-inf")
        self._refused: int | None = None

    def handle(self, event: DemandSeen, now: float) -> list[Instruction]:
        waited = now - self._since
        demanded = self._demanded or 0
        if event.is_refused and demanded > event.have and waited >= SECONDS_TO_JUDGE:
            self._refused, self._refused_at = demanded, now
        elif now - self._refused_at >= self._retry_seconds:
            self._refused = None
        count = self._between(event.most, event.have)
        if count == self._demanded:
            return []
        self._demanded, self._since = count, now
        return [Demand(count)]

    def _between(self, most: int, have: int) -> int:
        """Half-way from what there is to what was refused."""
        if have >= most or self._refused is None:
            return most
        if self._refused <= self._least:
            return have
        return min(most, max(self._least, have, (have + self._refused) // 2))


# Ray numbers workers node by node, in the order in which it was asked for their places. So the
# order of nodes is that of ranks: neighbours have one stage of a pipeline, or the next.


def place(rooms: Mapping[str, int], workers: int, tensor: int) -> list[str] | None:
    """The node of each worker, in the order of ranks; None where there is no room for all.

    Whole tensor groups come first, node by node. Where these are not all there is room for what is
    left over of each node, which comes last: few groups lie on several nodes then.

    Args:
        rooms: workers that fit on each node; those in front are taken first.
        workers: that are wanted, a multiple of `tensor`.
        tensor: workers of a tensor group.
    """
    whole = {node: room - room % tensor for node, room in rooms.items()}
    if sum(rooms.values()) < workers:
        return None
    taken = _taken(whole, workers)
    left = workers - sum(taken.values())
    rest = _taken({node: rooms[node] - whole[node] for node in rooms}, left)
    counts = {node: taken[node] + rest[node] for node in rooms}
    even = [node for node in rooms if not rest[node]]
    order = [*even, *(node for node in rooms if rest[node])]
    return [node for node in order for _ in range(counts[node])]


def in_whole_groups(rooms: Sequence[int], tensor: int) -> int:
    """Workers that there is room for in tensor groups that lie on one node each."""
    return sum(room - room % tensor for room in rooms)


def split_groups(nodes: Sequence[str], tensor: int) -> int:
    """Tensor groups whose workers are on several nodes.

    Args:
        nodes: of each rank.
        tensor: workers of a tensor group, which are neighbours.
    """
    groups = (nodes[first : first + tensor] for first in range(0, len(nodes), tensor))
    return sum(len(set(group)) > 1 for group in groups)


def in_order(
    rooms: Mapping[str, int], peaks: Mapping[str, float], *, fastest_first: bool
) -> dict[str, int]:
    """Nodes with equally fast devices one after the other, the largest rooms of each first.

    Args:
        rooms: workers that fit on each node.
        peaks: of the devices of each node; those of others are taken for equal.
        fastest_first: else they come last.
    """
    sign = -1 if fastest_first else 1
    order = sorted(rooms, key=lambda node: (sign * peaks.get(node, 0.0), -rooms[node], node))
    return {node: rooms[node] for node in order}


def split_line(nodes: Sequence[str], tensor: int) -> str:
    """What to tell of tensor groups that lie on several nodes; empty where none does."""
    split = split_groups(nodes, tensor)
    if not split:
        return ""
    return (
        f"parallel.tensor: {tensor}: {split} of {len(nodes) // tensor} groups have workers on "
        "several nodes, and talk over the network in every block; a node with room for a multiple "
        f"of {tensor} workers has whole groups"
    )


def _taken(rooms: Mapping[str, int], workers: int) -> dict[str, int]:
    """Workers on each node, where those in front are filled first."""
    taken = {}
    for node, room in rooms.items():
        taken[node] = min(room, workers)
        workers -= taken[node]
    return taken
