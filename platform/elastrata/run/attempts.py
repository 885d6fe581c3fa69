"""The attempts of a run: each group of workers, the steps it did, those that a later one undid, and
what it cost that others had to take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastrata.run.lineage import Lineage

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One group of workers, from its start to its end."""

    attempt: int
    world_size: int
    state: str
    """The tier of the state that it continued from: `new`, `hot` (the memory of other processes) or
    `durable`."""
    step: int
    """Steps done in that state."""
    started: float
    """Unix time at which it was ready for its first step."""
    seconds_starting: float
    """Seconds that this took since its processes were there; 0 where the history does not say."""
    steps: tuple[Entry, ...]
    """Its steps, in the order it did them."""
    rolled_back: int
    """How many of them a later attempt undid."""

    @property
    def first(self) -> int | None:
        """Its first step; None where it was lost before it had done any."""
        return self.steps[0]["step"] if self.steps else None

    @property
    def last(self) -> int | None:
        """Its last step."""
        return self.steps[-1]["step"] if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the steps themselves."""
        return {
            "attempt": self.attempt,
            "world_size": self.world_size,
            "first": self.first,
            "last": self.last,
            "rolled_back": self.rolled_back,
            "state": self.state,
            "step": self.step,
        }


def attempts(entries: Sequence[Entry]) -> list[Attempt]:
    """The attempts of a history, in order; one without a `started` entry is none."""
    undone = Counter(step["attempt"] for steps in undone_steps(entries).values() for step in steps)
    steps: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry["kind"] == "step":
            steps.setdefault(entry["attempt"], []).append(entry)
    return [
        Attempt(
            attempt=entry["attempt"],
            world_size=entry["world_size"],
            state=entry.get("state", "durable" if entry["step"] else "new"),
            step=entry["step"],
            started=entry["time"],
            seconds_starting=sum(entry.get("seconds", {}).values()),
            steps=tuple(steps.get(entry["attempt"], ())),
            rolled_back=undone[entry["attempt"]],
        )
        for entry in entries
        if entry["kind"] == "started"
    ]


def undone_steps(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """The steps that counted until an attempt started from before them, by that attempt."""
    lineage, steps, seen = Lineage(), list[Entry](), list[Entry]()
    undone: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry["kind"] == "step":
            steps.append(entry)
            seen.append(entry)
        elif event := lineage.event(entry):
            left = lineage.left(event, steps, seen)
            kept = set(map(id, left))
            undone[event.attempt] = [step for step in steps if id(step) not in kept]
            steps = left
    return undone


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
    """Seconds of those of them that are in the history."""
    world_size: int
    state: str
    """The tier of the state that it continued from: `new`, `hot` or `durable`."""


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
                cause=cause(entries, before, after),
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


def cause(entries: Sequence[Entry], before: Attempt, after: Attempt) -> str:
    """Why one group took over from another, as `Recovery.cause` has it."""

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
    stopped = before.steps[-1]["time"] if before.steps else before.started
    resumed = after.steps[0]["time"] if after.steps else after.started
    ends = (entry["time"] for entry in entries if entry["kind"] == "ended")
    return "restart" if any(stopped <= time <= resumed for time in ends) else "unknown"
