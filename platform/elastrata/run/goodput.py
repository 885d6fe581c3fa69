"""Goodput: what the seconds of a run went into, from its history alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from elastrata.run.attempts import Attempt, attempts, cause, undone_steps
from elastrata.run.timeline import Timeline

Entry = Mapping[str, Any]
_PLANNED = ("resize", "drain", "stop")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds from the first group's start to the last entry, less the time when the run had ended;
    each once, by what it went into. None is negative, whatever clocks did, and they add up."""

    steps: float = 0.0
    """Steps that count."""
    waiting_for_data: float = 0.0
    """In these, until their data was there."""
    done_again: float = 0.0
    """Steps on record that a later group did once more. Steps whose record was lost are in
    `recovering`."""
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
    """Steps of a group whose start is not in the history."""

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
    timeline = Timeline(entries, groups)
    again = {id(step) for steps in undone_steps(entries).values() for step in steps}
    known = [step for group in groups for step in group.steps]
    counting = [step for step in known if id(step) not in again]
    waiting = sum(min(s.get("seconds_waiting_for_data", 0.0), s["seconds"]) for s in counting)
    ids = set(map(id, known))
    orphans = (e for e in entries if e["kind"] == "step" and id(e) not in ids)
    return Goodput(
        steps=max(0.0, sum(step["seconds"] for step in counting) - waiting),
        waiting_for_data=waiting,
        done_again=sum(step["seconds"] for step in known if id(step) in again),
        evaluating=timeline.evaluating,
        saving=timeline.between_steps,
        starting=_starting(groups, timeline),
        **_between_groups(entries, groups, timeline),
        ending=timeline.ending,
        other=sum(step["seconds"] for step in orphans),
    )


def _starting(groups: Sequence[Attempt], timeline: Timeline) -> dict[str, float]:
    """Seconds by phase, over all groups, until the first step of each began."""
    phases: dict[str, float] = {}
    for group in groups:
        for phase, seconds in group.entry.get("seconds", {}).items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return {**phases, "first_step": timeline.first_steps}


def _between_groups(
    entries: Sequence[Entry], groups: Sequence[Attempt], timeline: Timeline
) -> dict[str, float]:
    spent = dict.fromkeys(("halted", "recovering", "restarting"), 0.0)
    for index, (before, after) in enumerate(pairwise(groups)):
        why = cause(entries, before, after, has_ended=timeline.has_ended_after(index))
        kind = "halted" if why in _PLANNED else "restarting" if why == "restart" else "recovering"
        spent[kind] += timeline.between_groups[index]
    return spent
