"""Measured speeds: what a group begins with, and how the tasks that read for it hear of others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import ray
from typing_extensions import override

from elastrata.cluster.speed_book import STEPS_AHEAD, GroupKey
from elastrata_pipelines.speeds import Speeds, SpeedSource, of_groups, quantized
from elastrata_pipelines.stream import PREFETCHED_PAYLOADS

STEPS_IN_A_GROUP = STEPS_AHEAD // (PREFETCHED_PAYLOADS + 1)
"""Most steps that are read and dealt together: all by the same speeds. Ray Data hands a rank a
payload when it has so many more for it: were these further ahead than readers may be, training and
reading would wait for each other."""
_ANSWER_SECONDS, _PAUSE_SECONDS = 10.0, 0.2


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
                Event().wait(_PAUSE_SECONDS)  # another channel takes its place
                continue
            if speeds is not None:
                return speeds
