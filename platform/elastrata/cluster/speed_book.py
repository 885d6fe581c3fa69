"""The speed book: by which speeds each step of a group is dealt, told to the tasks that read it.

It lives in the control channel. One that is new, as its process was lost, goes by the speeds that
the group began with until it hears of others.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from elastrata.core.events import Event, Paced, Slowed, Started
from elastrata.core.record import StepRecord
from elastrata_pipelines.speeds import Speeds

STEPS_AHEAD = 12
"""Steps that may be read before they are trained on."""
SECONDS_AHEAD = 3.0
"""More of them where they take less time: reading is to stay ahead of steps of any length, and this
book hears of them a little later."""


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
