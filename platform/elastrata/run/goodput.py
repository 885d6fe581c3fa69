"""Goodput: what the seconds of a run went into, from its history alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from elastrata.run.attempts import Attempt, attempts, cause, idle_seconds, undone_steps

Entry = Mapping[str, Any]
_PLANNED = ("resize", "drain", "stop")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds from the first group's start to the last entry, less the time when the run had ended;
    all of them, by what they went into."""

    steps: float = 0.0
    """Steps that count."""
    waiting_for_data: float = 0.0
    """In these, until their data was there."""
    done_again: float = 0.0
    """Steps that a later group did once more."""
    evaluating: float = 0.0
    saving: float = 0.0
    """From one step to the next, less evaluations: copies of the state, and the record."""
    starting: Mapping[str, float] = field(default_factory=dict)
    """Until groups had their first batches, once their processes were there: by phase."""
    halted: float = 0.0
    """Planned changes: from a group's last step until the processes of the next were there."""
    recovering: float = 0.0
    """The same after a loss, with what it takes to notice it and to wait for room."""
    restarting: float = 0.0
    """The same with another driver; what a launch takes before that is in no history."""
    ending: float = 0.0
    """From the last step on."""
    other: float = 0.0
    """What is left: clocks of several machines."""

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.to_metrics(prefix="").values())

    @property
    def share(self) -> float:
        """That of steps that count in all; 0 where there is none yet."""
        return self.steps / self.total if self.total else 0.0

    def to_metrics(self, prefix: str = "goodput/") -> dict[str, float]:
        """Seconds by metric name; the phases of a start together."""
        plain = {**asdict(self), "starting": sum(self.starting.values())}
        return {f"{prefix}{name}": float(value) for name, value in plain.items()}


def goodput(entries: Sequence[Entry]) -> Goodput:
    """The account of a history."""
    groups = attempts(entries)
    if not groups:
        return Goodput()
    times = [float(entry["time"]) for entry in entries]
    total = max(times) - min(times) + groups[0].seconds_starting
    total -= idle_seconds(entries, min(times), max(times))
    again = {id(step) for steps in undone_steps(entries).values() for step in steps}
    counting = [s for group in groups for s in group.steps if id(s) not in again]
    undone = [s for group in groups for s in group.steps if id(s) in again]
    waiting = sum(step.get("seconds_waiting_for_data", 0.0) for step in counting)
    evaluating = sum(e.get("seconds", 0.0) for e in entries if e["kind"] == "evaluated")
    last = _end(groups[-1])
    parts: dict[str, float] = {
        "steps": sum(step["seconds"] for step in counting) - waiting,
        "waiting_for_data": waiting,
        "done_again": sum(step["seconds"] for step in undone),
        "evaluating": evaluating,
        "saving": max(0.0, sum(map(_between_steps, groups)) - evaluating),
        "ending": max(0.0, max(times) - last - idle_seconds(entries, last, max(times))),
        **_between_groups(entries, groups),
    }
    starting = _starting(entries, groups)
    other = total - sum(parts.values()) - sum(starting.values())
    return Goodput(**parts, starting=starting, other=other)


def _end(group: Attempt) -> float:
    """The time of its last step, or of its start."""
    return float(group.steps[-1]["time"]) if group.steps else group.started


def _between_steps(group: Attempt) -> float:
    pairs = pairwise(group.steps)
    return sum(max(0.0, float(b["time"] - a["time"] - b["seconds"])) for a, b in pairs)


def _starting(entries: Sequence[Entry], groups: Sequence[Attempt]) -> dict[str, float]:
    """Seconds by phase, over all groups, until the first step of each began."""
    phases: dict[str, float] = {}
    for entry in entries:
        if entry["kind"] == "started":
            for phase, seconds in entry.get("seconds", {}).items():
                phases[phase] = phases.get(phase, 0.0) + seconds
    firsts = [(group, group.steps[0]) for group in groups if group.steps]
    waits = [max(0.0, s["time"] - s["seconds"] - group.started) for group, s in firsts]
    return {**phases, "first_step": sum(waits)}


def _between_groups(entries: Sequence[Entry], groups: Sequence[Attempt]) -> dict[str, float]:
    spent = dict.fromkeys(("halted", "recovering", "restarting"), 0.0)
    for before, after in pairwise(groups):
        since, until = _end(before), after.started - after.seconds_starting
        seconds = max(0.0, until - since - idle_seconds(entries, since, after.started))
        why = cause(entries, before, after)
        kind = "halted" if why in _PLANNED else "restarting" if why == "restart" else "recovering"
        spent[kind] += seconds
    return spent
