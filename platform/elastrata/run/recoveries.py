"""The recoveries of a run: what it cost every time that other workers had to take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastrata.run.attempts import Attempt, attempts, undone_steps

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From the last step of one group of workers to the first step of the next that did any."""

    attempt: int
    """The attempt that took over."""
    time: float
    """Unix time of the last step before."""
    cause: str
    """`resize`, `drain` or `stop`: planned, the state was saved first. `fault`: a group was lost.
    `returned`: a user went back to a checkpoint.
    `restart`: the run had ended and was launched again. `unknown`: the history does not say."""
    seconds: float
    """Without a step; the time between two launches, when the run had ended, is not counted."""
    steps_rolled_back: int
    """As the driver knows it, which hears of steps before they are in the history."""
    seconds_rolled_back: float
    """What those of them had taken that are in the history."""
    world_size: int
    state: str
    """What it continued from: `new`, `hot` or `durable`."""


def recoveries(entries: Sequence[Entry]) -> list[Recovery]:
    """The recoveries of a history, in order."""
    groups = attempts(entries)
    undone = undone_steps(entries)
    found = []
    for before, after in pairwise(group for group in groups if group.steps):
        stopped, resumed = before.steps[-1]["time"], after.steps[0]["time"]
        between = range(before.attempt + 1, after.attempt + 1)
        rolled_back = [step for attempt in between for step in undone.get(attempt, ())]
        said = [e for e in entries if e["kind"] == "rolled_back" and e["attempt"] in between]
        count = sum(entry["last"] - entry["first"] + 1 for entry in said)
        found.append(
            Recovery(
                attempt=after.attempt,
                time=stopped,
                cause=_cause(entries, before, after),
                seconds=max(0.0, resumed - stopped - idle_seconds(entries, stopped, resumed)),
                steps_rolled_back=max(len(rolled_back), count),
                seconds_rolled_back=sum(step["seconds"] for step in rolled_back),
                world_size=after.world_size,
                state=after.state,
            )
        )
    return found


def idle_seconds(entries: Sequence[Entry], since: float, until: float) -> float:
    """How long, between two times, the run had ended and was not launched again yet.

    What a launch takes before its workers are there belongs to that time: no history tells it.
    """
    inside = sorted(
        (entry for entry in entries if since <= entry["time"] <= until),
        key=lambda entry: float(entry["time"]),
    )
    return sum(
        max(0.0, _begun(after) - float(ended["time"]))
        for ended, after in pairwise(inside)
        if ended["kind"] == "ended"
    )


def _begun(entry: Entry) -> float:
    """The time of an entry; of the start of a group, when its processes were there."""
    seconds = entry.get("seconds", {}).values() if entry["kind"] == "started" else ()
    return float(entry["time"] - sum(seconds))


def _cause(entries: Sequence[Entry], before: Attempt, after: Attempt) -> str:
    def happened(kind: str) -> Iterator[Entry]:
        """Entries about the groups that are gone: by their number, for clocks may disagree."""
        return (
            entry
            for entry in entries
            if entry["kind"] == kind and before.attempt <= entry["attempt"] < after.attempt
        )

    if next(happened("returned"), None):
        return "returned"
    if halted := next(happened("halted"), None):
        return str(halted["reason"])
    if next(happened("fault"), None):
        return "fault"
    stopped, resumed = before.steps[-1]["time"], after.steps[0]["time"]
    ends = (entry["time"] for entry in entries if entry["kind"] == "ended")
    return "restart" if any(stopped <= time <= resumed for time in ends) else "unknown"
