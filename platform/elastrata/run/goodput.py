"""The time that a run has spent: what it went into, and how long it took to reach a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from elastrata.run import history
from elastrata.run.entries import metrics_of
from elastrata.run.timeline import Attempt, Timeline, attempts, cause, undone_steps
from elastrata.step.target import TargetConfig, reached

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


@dataclass(frozen=True, kw_only=True)
class TimeToTarget:
    """How a run stands to its target. All counts are None where it has not reached it."""

    metric: str
    at_least: float | None
    at_most: float | None
    reached: bool
    value: float | None
    """The metric in the first evaluation that reached the target, else of the newest; None: there
    was none yet, or not finite."""
    step: int | None = None
    """The one after which that evaluation was."""
    samples: int | None = None
    """Seen since the run began, over all workers."""
    tokens: int | None = None
    seconds: float | None = None
    """On the clock, from the moment when the first group of workers was ready for its first step:
    evaluations, faults and pauses between launches included."""
    seconds_in_steps: float | None = None
    """The time of the steps that count; those that were rolled back are not among them."""

    def __str__(self) -> str:
        """For people."""
        bound = f"<= {self.at_most:g}" if self.at_least is None else f">= {self.at_least:g}"
        if not self.reached:
            found = "no evaluation yet" if self.value is None else f"{self.value:.6g}"
            return f"not reached: {self.metric} {found}, expected {bound}"
        return (
            f"reached: {self.metric} {self.value:.6g} {bound} at step {self.step:,}, "
            f"{self.samples:,} samples, {self.tokens:,} tokens, after {self.seconds:.1f} s of "
            f"training ({self.seconds_in_steps:.1f} s in steps)"
        )

    def to_metrics(self) -> dict[str, float]:
        """The values to track, by metric name; none before the target is reached."""
        counts = {
            "target/step": self.step,
            "target/samples": self.samples,
            "target/tokens": self.tokens,
            "target/seconds": self.seconds,
            "target/seconds_in_steps": self.seconds_in_steps,
        }
        return {name: value for name, value in counts.items() if value is not None}


def time_to_target(entries: Sequence[Entry], target: TargetConfig) -> TimeToTarget:
    """How a run stands to a target.

    Args:
        entries: the run's history.
        target: of its recipe.
    """
    done = {step["step"] for step in history.effective_steps(entries)}
    evaluations = [e for e in history.surviving_evaluations(entries) if e["step"] in done]
    first = next((entry for entry in evaluations if reached(target, metrics_of(entry))), None)
    newest = first or (evaluations[-1] if evaluations else {})
    value = metrics_of(newest).get(target.metric, math.nan)
    return TimeToTarget(
        **target.model_dump(),
        reached=first is not None,
        value=value if math.isfinite(value) else None,
        **(_counts(entries, first) if first else {}),
    )


def _counts(entries: Sequence[Entry], evaluation: Entry) -> dict[str, Any]:
    """The counts and times of the run when it was evaluated."""
    steps = [s for s in history.effective_steps(entries) if s["step"] <= evaluation["step"]]
    groups = attempts(entries)
    began = groups[0].entry if groups else entries[0]
    timeline = Timeline(entries, groups)
    return {
        "step": evaluation["step"],
        "samples": steps[-1]["samples"],
        "tokens": steps[-1]["tokens"],
        "seconds": round(timeline.elapsed(began, evaluation, with_pauses=True), 3),
        "seconds_in_steps": round(sum(step["seconds"] for step in steps), 3),
    }
