"""Slow ranks, from a run's history: who is slower than its kind, and how unequal the times are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank of the newest group that is slower than the others of its kind."""

    rank: int
    host: str
    device: str
    factor: float
    """Its pace over theirs."""
    since: int
    """The step since which it has this pace."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}, {self.device}) trains at {self.factor:.2f} of the "
            f"speed of its kind since step {self.since}"
        )


@dataclass(frozen=True, kw_only=True)
class TimeBalance:
    """How equal the own times of ranks are, over the newest steps of a group."""

    imbalance: float
    """Of the slowest rank's seconds over the mean of all, the median."""
    slowest_rank: int
    """The rank that was the slowest one most often."""


def slow_ranks(entries: Sequence[Entry]) -> tuple[SlowRank, ...]:
    """Those of the newest group of workers, by rank."""
    newest = max((entry["attempt"] for entry in entries if entry["kind"] == "started"), default=0)
    slow: dict[int, SlowRank] = {}
    for entry in entries:
        if entry["kind"] == "slowed" and entry["attempt"] == newest:
            keys = ("rank", "host", "device", "factor", "since")
            slow[entry["rank"]] = SlowRank(**{key: entry[key] for key in keys})
            if entry["is_over"]:
                del slow[entry["rank"]]
    return tuple(slow[rank] for rank in sorted(slow))


def time_balance(steps: Sequence[Entry]) -> TimeBalance | None:
    """Over the newest steps; None where ranks were not measured.

    Args:
        steps: the entries of the steps that count, in order.
    """
    newest = [step for step in steps[-_STEPS:] if step.get("time_imbalance")]
    newest = [step for step in newest if step["world_size"] == newest[-1]["world_size"]]
    if not newest:
        return None
    return TimeBalance(
        imbalance=statistics.median(step["time_imbalance"] for step in newest),
        slowest_rank=statistics.mode(step["slowest_rank"] for step in newest),
    )
