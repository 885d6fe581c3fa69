"""Speeds and device kinds of the nodes of a group's workers.

Speeds come from factors in the recipe, or they are measured: rank 0 sends `Paced` events, the
control channel keeps them in a `SpeedBook`, and the tasks that read the data ask the book for the
speeds of each step. A `RankKind` says which devices have memory for fewer tokens.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event as Flag
from typing import Any

import ray
from typing_extensions import override

from elastrata.cluster.nodes import ACCELERATOR, NODE_GROUP, list_nodes
from elastrata.recipe.recipe import Recipe
from elastrata.step.events import Event, Paced, Slowed, Started
from elastrata.step.records import StepRecord
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.speeds import (
    FixedSpeeds,
    RankKind,
    RankKinds,
    Speeds,
    SpeedSource,
    equal_kinds,
    kinds_of_groups,
    paces_of_data_ranks,
    quantize_speeds,
)
from elastrata_pipelines.stream import PREFETCHED_ROWS

Node = Mapping[str, Any]
STEPS_AHEAD = 12
"""Steps that may be read before they are trained on."""
# Reading has to stay ahead of steps of any length, and the book learns of them a little later.
SECONDS_AHEAD = 3.0
"""Reading may be this many seconds ahead, if that is more than `STEPS_AHEAD` steps."""
# Ray Data gives a rank a payload once it has `PREFETCHED_ROWS` more for it. If these were
# further ahead than readers may be, training and reading would wait for each other.
STEPS_IN_A_GROUP = STEPS_AHEAD // (PREFETCHED_ROWS + 1)
"""Most steps that are read together, by the same speeds."""
_ANSWER_SECONDS, _PAUSE_SECONDS = 10.0, 0.2


def node_names(node: Node) -> tuple[str, ...]:
    """Return the names of a node in a recipe: its own ones first, then those of its kind."""
    own_names = (node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"])
    group = (node.get("Labels") or {}).get(NODE_GROUP)
    return (*own_names, *([group] if group else []), *device_names(node))


def device_names(node: Node) -> list[str]:
    """Return the names of a node's devices: Ray's name of its GPUs, such as A100; else CPU."""
    names = [r.removeprefix(ACCELERATOR) for r in node["Resources"] if r.startswith(ACCELERATOR)]
    return sorted(names) or ["CPU"]


def find_name_problems(recipe: Recipe, gpus: float) -> list[str]:
    """Return a line for each name in `workers.speeds` and `workers.micro_batch_tokens` that no node
    of the cluster has.

    Args:
        recipe: the recipe to check.
        gpus: GPUs per worker.

    Raises:
        UserError: the speeds cannot be measured.
    """
    speeds = recipe.workers.speeds
    if gpus and recipe.compile is True and speeds == "measured":
        raise UserError(
            "workers.speeds: measured: expected compile: false on GPUs, because times are measured "
            "at block boundaries; or equal, or factors"
        )
    factors = {} if isinstance(speeds, str) else speeds
    return [
        *find_unknown_names("speeds", factors),
        *find_unknown_names("micro_batch_tokens", recipe.workers.micro_batch_tokens),
    ]


def find_unknown_names(key: str, values: Mapping[str, float]) -> list[str]:
    """Return a line for each name that no node of the cluster has.

    Args:
        key: key in the section `workers`.
        values: value of the key, by name.
    """
    if not values:
        return []
    alive = [node for node in list_nodes() if node["Alive"]]
    known_names = {name for node in alive for name in node_names(node)}
    devices = sorted({name for node in alive for name in device_names(node)})
    return [
        f"workers.{key}.{name}: {value:.10g}: no such node or device in the cluster, whose "
        f"devices are {', '.join(devices)}{suggest_nearest(name, known_names)}"
        for name, value in values.items()
        if name not in known_names
    ]


@dataclass(frozen=True, kw_only=True)
class FixedFactors:
    """The speeds of any group of workers, from factors."""

    factors: Mapping[str, float]
    """Factor by the name of a node or a device; all others have 1."""
    copies: int
    """Number of consecutive ranks that have the same rows."""
    repeats: int
    """Number of sets of ranks; the ranks of each set together have all rows."""

    def __call__(self, node_ids: Sequence[str]) -> SpeedSource:
        """Return the speeds of a group, given the node of each rank."""
        paces = list(self._paces(node_ids))
        groups = paces_of_data_ranks(paces, copies=self.copies, repeats=self.repeats)
        return FixedSpeeds(quantize_speeds(groups))

    def _paces(self, node_ids: Sequence[str]) -> Iterable[float]:
        by_id = {node["NodeID"]: node_names(node) for node in list_nodes()}
        for node in node_ids:
            names = [name for name in by_id.get(node, (node,)) if name in self.factors]
            yield self.factors[names[0]] if names else 1.0


def kinds_by_node(recipe: Recipe) -> Callable[[Sequence[str]], RankKinds]:
    """Return a function from the nodes of a group's workers to their kinds. All ranks are of one
    kind if the recipe has a single number of tokens."""
    fewer, parallel = recipe.workers.micro_batch_tokens, recipe.parallel
    if not fewer and all(part.micro_batch_tokens != "auto" for part in recipe.parts):
        return equal_kinds
    return NodeKinds(fewer=fewer, copies=parallel.tensor, repeats=parallel.pipeline)


@dataclass(frozen=True, kw_only=True)
class NodeKinds:
    """The kinds of any group of workers."""

    fewer: Mapping[str, int]
    """Most tokens of a micro-batch, by the name of a node or a device."""
    copies: int
    """Number of consecutive ranks that have the same rows."""
    repeats: int
    """Number of sets of ranks; the ranks of each set together have all rows."""

    def __call__(self, node_ids: Sequence[str]) -> RankKinds:
        """Return the kinds of a group's data ranks, given the node of each rank."""
        by_id = {node["NodeID"]: self._kind(node) for node in list_nodes() if node["Alive"]}
        kinds = tuple(by_id.get(node, RankKind()) for node in node_ids)
        return kinds_of_groups(kinds, copies=self.copies, repeats=self.repeats)

    def _kind(self, node: Node) -> RankKind:
        device = "/".join(device_names(node))
        named = [name for name in node_names(node) if name in self.fewer]
        if not named:
            return RankKind(device)
        most = self.fewer[named[0]]
        return RankKind(device if named[0] == device else f"{device} of {named[0]}", most)


@dataclass(frozen=True)
class GroupKey:
    """Key of a group of workers for the tasks that read its data. A later group has a larger
    number."""

    number: int
    num_ranks: int
    """Number of data ranks."""
    begins_with: Speeds


class SpeedBook:
    """Measured speeds of the newest group; returns the same answer for the same step."""

    def __init__(self) -> None:
        self._group: GroupKey | None = None
        self._first_steps: list[int] = []
        self._answers: list[Speeds] = []
        self._read_to = -1
        self._newest_speeds: Speeds = ()
        self._trained_to, self._has_started = 0, False
        self._steps_ahead = STEPS_AHEAD
        self._nodes: Mapping[int, str] = {}
        self._paces: dict[str, float] = {}
        self._slow: dict[str, dict[int, float]] = {}

    def note(self, event: Event) -> None:
        """Update steps and speeds from an event."""
        match event:
            case StepRecord():
                self._trained_to, self._has_started = event.step, True
                if event.seconds > 0:
                    self._steps_ahead = max(STEPS_AHEAD, round(SECONDS_AHEAD / event.seconds))
            case Started():
                self._nodes = {rank: node for rank, (node, _) in event.pids.items()}
                self._trained_to, self._has_started = event.step, True
                # The new group's workers are measured afresh.
                for node in set(self._nodes.values()) & self._slow.keys():
                    del self._slow[node]
            case Slowed():
                ranks = self._slow.setdefault(event.node, {})
                ranks[event.rank] = 1.0 if event.is_over else event.factor
            case Paced():
                # An event of an older group may arrive late.
                if self._group and len(event.speeds) == self._group.num_ranks:
                    self._newest_speeds = event.speeds
                self._note_paces(event.paces)
            case _:
                pass

    def paces(self) -> Mapping[str, float]:
        """Return the last measured work per second, by node."""
        return dict(self._paces)

    def slow_nodes(self) -> Mapping[str, float]:
        """Return the speed of a node's slowest worker relative to its kind, for nodes that had a
        slow one when last measured."""
        return {node: min(ranks.values()) for node, ranks in self._slow.items()}

    def speeds(self, group: GroupKey, step: int) -> Speeds | None:
        """Return the speeds by which the steps after this one are assigned; None if it is too
        early.

        Args:
            group: the group that the steps are read for.
            step: number of the step.
        """
        if self._group is None or group.number > self._group.number:
            self._begin(group, step)
        if group != self._group:
            return group.begins_with
        # Before the first step, readers may ask in any order: training begins at the smallest step.
        if not self._has_started:
            self._trained_to = min(self._trained_to, step)
        # A task that asks again, as after a retry, must get the same answer.
        if step <= self._read_to:
            return self._answers[max(0, bisect_right(self._first_steps, step) - 1)]
        if step > self._trained_to + self._steps_ahead:
            return None
        self._read_to = step
        if not self._answers or self._answers[-1] != self._newest_speeds:
            self._first_steps.append(step)
            self._answers.append(self._newest_speeds)
        return self._newest_speeds

    def _begin(self, group: GroupKey, step: int) -> None:
        self._group, self._newest_speeds = group, group.begins_with
        self._first_steps, self._answers, self._read_to = [], [], -1
        self._trained_to, self._has_started = step, False

    def _note_paces(self, paces: tuple[float, ...]) -> None:
        by_node: dict[str, list[float]] = {}
        for rank, pace in enumerate(paces):
            if rank in self._nodes and pace > 0:
                by_node.setdefault(self._nodes[rank], []).append(pace)
        self._paces |= {node: statistics.median(node_paces) for node, node_paces in by_node.items()}


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeeds:
    """The measured speeds of any group of workers."""

    channel: Any
    """Handle of the control channel, which has the speed book."""
    copies: int
    """Number of consecutive ranks that have the same rows."""
    repeats: int
    """Number of sets of ranks; the ranks of each set together have all rows."""

    def __call__(self, node_ids: Sequence[str]) -> SpeedSource:
        """Return the speeds of a group, given the node of each rank. They begin with the paces of
        these nodes in the previous group; new nodes get the median."""
        try:
            known_paces = ray.get(self.channel.paces.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError:
            known_paces = {}
        paces_here = [known_paces[node] for node in node_ids if node in known_paces]
        median_pace = statistics.median(paces_here) if paces_here else 1.0
        paces = [known_paces.get(node, median_pace) for node in node_ids]
        groups = paces_of_data_ranks(paces, copies=self.copies, repeats=self.repeats)
        speeds = quantize_speeds(groups) if paces_here else ()
        # Unix time orders the groups of all controllers of the run.
        key = GroupKey(number=time.time_ns(), num_ranks=len(groups), begins_with=speeds)
        return ChannelSpeeds(self.channel, key)


@dataclass(frozen=True)
class ChannelSpeeds(SpeedSource):
    """Speeds from the speed book; a call waits until training comes near the step."""

    channel: Any
    group: GroupKey

    @override
    def __call__(self, step: int) -> Speeds:
        while True:
            try:
                call = self.channel.speeds.remote(self.group, step)
                speeds: Speeds | None = ray.get(call, timeout=_ANSWER_SECONDS)
            except ray.exceptions.RayError:
                Flag().wait(_PAUSE_SECONDS)  # another channel takes its place
                continue
            if speeds is not None:
                return speeds
