"""Speeds and kinds of the nodes that a group's workers are on.

A recipe gives factors, or the speeds are measured: rank 0 sends `Paced` events, the control channel
keeps them in a `SpeedBook`, and the tasks that read the data ask the book by which speeds each step
is dealt. `RankKind`s say which devices have room for fewer tokens.
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

from elastrata.cluster.nodes import ACCELERATOR, NODE_GROUP, nodes
from elastrata.recipe.recipe import Recipe
from elastrata.step.events import Event, Paced, Slowed, Started
from elastrata.step.records import StepRecord
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.speeds import (
    FixedSpeeds,
    RankKind,
    RankKinds,
    Speeds,
    SpeedSource,
    kinds_of_groups,
    of_groups,
    one_kind,
    quantized,
)
from elastrata_pipelines.stream import PREFETCHED_PAYLOADS

Node = Mapping[str, Any]
STEPS_AHEAD = 12
"""Steps that may be read before they are trained on."""
SECONDS_AHEAD = 3.0
"""More of them where they take less time: reading is to stay ahead of steps of any length, and this
book hears of them a little later."""
STEPS_IN_A_GROUP = STEPS_AHEAD // (PREFETCHED_PAYLOADS + 1)
"""Most steps that are read and dealt together: all by the same speeds. Ray Data hands a rank a
payload when it has so many more for it: were these further ahead than readers may be, training and
reading would wait for each other."""
_ANSWER_SECONDS, _PAUSE_SECONDS = 10.0, 0.2


def names_of(node: Node) -> tuple[str, ...]:
    """The names by which a recipe may mean a node: its own ones first, then those of its kind."""
    own = (node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"])
    group = (node.get("Labels") or {}).get(NODE_GROUP)
    return (*own, *([group] if group else []), *devices_of(node))


def devices_of(node: Node) -> list[str]:
    """The names of a node's devices: of its GPUs as Ray has them, such as A100; else CPU."""
    names = [r.removeprefix(ACCELERATOR) for r in node["Resources"] if r.startswith(ACCELERATOR)]
    return sorted(names) or ["CPU"]


def name_problems(recipe: Recipe, gpus: float) -> list[str]:
    """A line for each name in `workers.speeds` and `workers.micro_batch_tokens` that no node of the
    cluster has.

    Args:
        recipe: with the key.
        gpus: that each worker claims.

    Raises:
        UserError: the speeds cannot be measured.
    """
    speeds = recipe.workers.speeds
    if gpus and recipe.compile and speeds == "measured":
        raise UserError(
            "workers.speeds: measured: expected compile: false on GPUs, as times are taken at the "
            "bounds of a block; or equal, or factors"
        )
    factors = {} if isinstance(speeds, str) else speeds
    return [
        *unknown_names("speeds", factors),
        *unknown_names("micro_batch_tokens", recipe.workers.micro_batch_tokens),
    ]


def unknown_names(key: str, values: Mapping[str, float]) -> list[str]:
    """A line for each name that no node of the cluster has.

    Args:
        key: of the section `workers`.
        values: its own, by name.
    """
    if not values:
        return []
    alive = [node for node in nodes() if node["Alive"]]
    known = {name for node in alive for name in names_of(node)}
    devices = sorted({name for node in alive for name in devices_of(node)})
    return [
        f"workers.{key}.{name}: {value:.10g}: no node or device of that name in the cluster, whose "
        f"devices are {', '.join(devices)}{nearest(name, known)}"
        for name, value in values.items()
        if name not in known
    ]


@dataclass(frozen=True, kw_only=True)
class FixedFactors:
    """The speeds of any group of workers, from factors. A value."""

    factors: Mapping[str, float]
    """By the name of a node or a device; of all others 1."""
    copies: int
    """So many neighbouring ranks have the same rows."""
    repeats: int
    """The ranks that have all rows between them come so many times over."""

    def __call__(self, node_ids: Sequence[str]) -> SpeedSource:
        """The speeds of a group, whose ranks are on these nodes."""
        paces = list(self._paces(node_ids))
        groups = of_groups(paces, copies=self.copies, repeats=self.repeats)
        return FixedSpeeds(quantized(groups))

    def _paces(self, node_ids: Sequence[str]) -> Iterable[float]:
        by_id = {node["NodeID"]: names_of(node) for node in nodes()}
        for node in node_ids:
            names = [name for name in by_id.get(node, (node,)) if name in self.factors]
            yield self.factors[names[0]] if names else 1.0


def kinds_by_node(recipe: Recipe) -> Callable[[Sequence[str]], RankKinds]:
    """The kinds of any group of workers, by the nodes that they are on. Where a recipe has one
    number of tokens for all, there is one kind."""
    fewer, parallel = recipe.workers.micro_batch_tokens, recipe.parallel
    if not fewer and all(part.micro_batch_tokens != "auto" for part in recipe.parts):
        return one_kind
    return NodeKinds(fewer=fewer, copies=parallel.tensor, repeats=parallel.pipeline)


@dataclass(frozen=True, kw_only=True)
class NodeKinds:
    """The kinds of any group of workers. A value."""

    fewer: Mapping[str, int]
    """By the name of a node or a device: most tokens of a micro-batch there."""
    copies: int
    """So many neighbouring ranks have the same rows."""
    repeats: int
    """The ranks that have all rows between them come so many times over."""

    def __call__(self, node_ids: Sequence[str]) -> RankKinds:
        """The kinds of the data ranks of a group, whose ranks are on these nodes."""
        by_id = {node["NodeID"]: self._kind(node) for node in nodes() if node["Alive"]}
        kinds = tuple(by_id.get(node, RankKind()) for node in node_ids)
        return kinds_of_groups(kinds, copies=self.copies, repeats=self.repeats)

    def _kind(self, node: Node) -> RankKind:
        device = "/".join(devices_of(node))
        named = [name for name in names_of(node) if name in self.fewer]
        if not named:
            return RankKind(device)
        most = self.fewer[named[0]]
        return RankKind(device if named[0] == device else f"{device} of {named[0]}", most)


@dataclass(frozen=True)
class GroupKey:
    """A group of workers, for those who read for it. A later group's number is larger."""

    number: int
    num_ranks: int
    """Data ranks."""
    begins_with: Speeds


class SpeedBook:
    """Of the newest group. What was said of a step is said again to who asks again."""

    def __init__(self) -> None:
        self._group: GroupKey | None = None
        self._firsts: list[int] = []
        self._said: list[Speeds] = []
        self._read_to = -1
        self._newest: Speeds = ()
        self._reached, self._has_started = 0, False
        self._ahead = STEPS_AHEAD
        self._nodes: Mapping[int, str] = {}
        self._paces: dict[str, float] = {}
        self._slow: dict[str, dict[int, float]] = {}

    def note(self, event: Event) -> None:
        """Takes what an event says of steps and speeds."""
        match event:
            case StepRecord():
                self._reached, self._has_started = event.step, True
                if event.seconds > 0:
                    self._ahead = max(STEPS_AHEAD, round(SECONDS_AHEAD / event.seconds))
            case Started():
                self._nodes = {rank: node for rank, (node, _) in event.pids.items()}
                self._reached, self._has_started = event.step, True
                for node in set(self._nodes.values()) & self._slow.keys():
                    del self._slow[node]
            case Slowed():
                ranks = self._slow.setdefault(event.node, {})
                ranks[event.rank] = 1.0 if event.is_over else event.factor
            case Paced():
                if self._group and len(event.speeds) == self._group.num_ranks:
                    self._newest = event.speeds
                self._note_paces(event.paces)
            case _:
                pass

    def paces(self) -> Mapping[str, float]:
        """Work by second of the nodes that were measured last, by node."""
        return dict(self._paces)

    def slow_nodes(self) -> Mapping[str, float]:
        """The share of its kind's pace that the slowest worker of a node has, by node: of nodes
        that had a slow one when they were seen last."""
        return {node: min(ranks.values()) for node, ranks in self._slow.items()}

    def speeds(self, group: GroupKey, step: int) -> Speeds | None:
        """The speeds that the steps behind this one are dealt by; None: it is too early to say.

        Args:
            group: that they are read for.
            step: its number.
        """
        if self._group is None or group.number > self._group.number:
            self._begin(group, step)
        if group != self._group:
            return group.begins_with
        if not self._has_started:
            self._reached = min(self._reached, step)
        if step <= self._read_to:
            return self._said[max(0, bisect_right(self._firsts, step) - 1)]
        if step > self._reached + self._ahead:
            return None
        self._read_to = step
        if not self._said or self._said[-1] != self._newest:
            self._firsts.append(step)
            self._said.append(self._newest)
        return self._newest

    def _begin(self, group: GroupKey, step: int) -> None:
        self._group, self._newest = group, group.begins_with
        self._firsts, self._said, self._read_to = [], [], -1
        self._reached, self._has_started = step, False

    def _note_paces(self, paces: tuple[float, ...]) -> None:
        by_node: dict[str, list[float]] = {}
        for rank, pace in enumerate(paces):
            if rank in self._nodes and pace > 0:
                by_node.setdefault(self._nodes[rank], []).append(pace)
        self._paces |= {node: statistics.median(found) for node, found in by_node.items()}


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeeds:
    """The speeds of any group of workers. A value."""

    channel: Any
    """Handle of the driver's channel, which has the speed book."""
    copies: int
    """So many neighbouring ranks have the same rows."""
    repeats: int
    """The ranks that have all rows between them come so many times over."""

    def __call__(self, node_ids: Sequence[str]) -> SpeedSource:
        """The speeds of a group, whose ranks are on these nodes. It begins with the paces of its
        nodes in the group before it; nodes that are new are taken for usual ones."""
        try:
            known = ray.get(self.channel.paces.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError:
            known = {}
        here = [known[node] for node in node_ids if node in known]
        usual = statistics.median(here) if here else 1.0
        paces = [known.get(node, usual) for node in node_ids]
        groups = of_groups(paces, copies=self.copies, repeats=self.repeats)
        speeds = quantized(groups) if here else ()
        key = GroupKey(number=time.time_ns(), num_ranks=len(groups), begins_with=speeds)
        return SpeedsOfChannel(self.channel, key)


@dataclass(frozen=True)
class SpeedsOfChannel(SpeedSource):
    """Asks the speed book, and waits for steps that the training does not come near to."""

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
