"""The attempts of a run: what every group of workers did, and what of it was undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastrata.run.lineage import Lineage

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One group of workers, from its start to its end."""

    attempt: int
    world_size: int
    state: str
    """What it continued from: `new`, `hot` (the memory of other processes) or `durable`."""
    step: int
    """Steps done in that state."""
    started: float
    """Unix time at which it was ready for its first step."""
    seconds_starting: float
    """What that took since its processes were there; 0 where the history does not say."""
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
