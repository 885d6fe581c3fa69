"""The time that a run has spent: its breakdown, and the time to reach a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from elastrata.run import history
from elastrata.run.entries import metrics_of
from elastrata.run.timeline import Attempt, Timeline, attempts, cause, undone_steps
from elastrata.step.target import TargetConfig, is_reached
from elastrata_pipelines.errors import pluralize

Entry = Mapping[str, Any]
_PLANNED = ("resize", "drain", "stop")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds from the first group's start to the last entry, by activity.

    The time in which the run had ended is not included. No value is negative, even if clocks
    jumped, and the values add up to the total.
    """

    steps: float = 0.0
    """Effective steps, without waiting for data."""
    waiting_for_data: float = 0.0
    """Effective steps, while waiting for data."""
    done_again: float = 0.0
    """Recorded steps that a later group repeated. Repeated steps without a record are part of
    `recovering`."""
    evaluating: float = 0.0
    saving: float = 0.0
    """From one step to the next, without evaluations: copying the state, and recording."""
    starting: Mapping[str, float] = field(default_factory=dict)
    """By phase: from the existence of a group's processes to its first batch."""
    halted: float = 0.0
    """Planned changes: from a group's last step until the next group's processes existed."""
    recovering: float = 0.0
    """The same after a loss, with the time to detect it and to wait for resources."""
    restarting: float = 0.0
    """The same with another driver. The history does not contain the launch itself."""
    ending: float = 0.0
    """After the last step."""
    other: float = 0.0
    """Steps of groups whose start is not in the history."""

    @property
    def total(self) -> float:
        """The sum of all values."""
        return sum(self.to_metrics(prefix="").values())

    @property
    def share(self) -> float:
        """The share of effective steps in the total; 0 without any step."""
        return self.steps / self.total if self.total else 0.0

    def to_metrics(self, prefix: str = "goodput/") -> dict[str, float]:
        """Return seconds by metric name, with the phases of a start added up."""
        plain = {**asdict(self), "starting": sum(self.starting.values())}
        return {f"{prefix}{name}": float(value) for name, value in plain.items()}


def goodput(entries: Sequence[Entry]) -> Goodput:
    """Return the time breakdown of a history."""
    groups = attempts(entries)
    timeline = Timeline(entries, groups)
    # By identity, because the steps of two attempts can have the same number.
    undone_ids = {id(step) for steps in undone_steps(entries).values() for step in steps}
    group_steps = [step for group in groups for step in group.steps]
    counting = [step for step in group_steps if id(step) not in undone_ids]
    # Bounded by the step's own time, so that `steps` cannot become negative.
    waiting = sum(min(s.get("seconds_waiting_for_data", 0.0), s["seconds"]) for s in counting)
    ids = set(map(id, group_steps))
    # Their group has no start, so they are not on the timeline.
    orphans = (e for e in entries if e["kind"] == "step" and id(e) not in ids)
    return Goodput(
        steps=max(0.0, sum(step["seconds"] for step in counting) - waiting),
        waiting_for_data=waiting,
        done_again=sum(step["seconds"] for step in group_steps if id(step) in undone_ids),
        evaluating=timeline.evaluating,
        saving=timeline.between_steps,
        starting=_sum_starts(groups, timeline),
        **_between_groups(entries, groups, timeline),
        ending=timeline.ending,
        other=sum(step["seconds"] for step in orphans),
    )


def _sum_starts(groups: Sequence[Attempt], timeline: Timeline) -> dict[str, float]:
    """Return the seconds until each group's first step began, by phase and added up over groups."""
    phases: dict[str, float] = {}
    for group in groups:
        for phase, seconds in group.entry.get("seconds", {}).items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return {**phases, "first_step": timeline.first_steps}


def _between_groups(
    entries: Sequence[Entry], groups: Sequence[Attempt], timeline: Timeline
) -> dict[str, float]:
    """Return the seconds between groups, by the cause of the change."""
    spent = dict.fromkeys(("halted", "recovering", "restarting"), 0.0)
    for index, (before, after) in enumerate(pairwise(groups)):
        why = cause(entries, before, after, has_ended=timeline.has_ended_after(index))
        # A cause that the history does not name counts as a loss.
        kind = "halted" if why in _PLANNED else "restarting" if why == "restart" else "recovering"
        spent[kind] += timeline.between_groups[index]
    return spent


@dataclass(frozen=True, kw_only=True)
class TimeToTarget:
    """The progress of a run towards its target. All counts are None until it is reached."""

    metric: str
    at_least: float | None
    at_most: float | None
    reached: bool
    value: float | None
    """The metric of the first evaluation that reached the target, else of the newest evaluation;
    None without an evaluation or if not finite."""
    step: int | None = None
    """The step of the first evaluation that reached the target."""
    samples: int | None = None
    """Samples seen until then by all workers, since the run began."""
    tokens: int | None = None
    seconds: float | None = None
    """Wall-clock seconds from the readiness of the first group of workers, including evaluations,
    faults and pauses between launches."""
    seconds_in_steps: float | None = None
    """Seconds of the effective steps, without those that were rolled back."""

    def __str__(self) -> str:
        """Describe the progress in one line."""
        bound = f"<= {self.at_most:g}" if self.at_least is None else f">= {self.at_least:g}"
        if not self.reached:
            found = "no evaluation yet" if self.value is None else f"{self.value:.6g}"
            return f"not reached: {self.metric} {found}, expected {bound}"
        return (
            f"reached: {self.metric} {self.value:.6g} {bound} at step {self.step:,}, "
            f"{pluralize(self.samples or 0, 'sample')}, {pluralize(self.tokens or 0, 'token')}, "
            f"after {self.seconds:.1f} s of training ({self.seconds_in_steps:.1f} s in steps)"
        )

    def to_metrics(self) -> dict[str, float]:
        """Return the values to track, by metric name; empty until the target is reached."""
        counts = {
            "target/step": self.step,
            "target/samples": self.samples,
            "target/tokens": self.tokens,
            "target/seconds": self.seconds,
            "target/seconds_in_steps": self.seconds_in_steps,
        }
        return {name: value for name, value in counts.items() if value is not None}


def time_to_target(entries: Sequence[Entry], target: TargetConfig) -> TimeToTarget:
    """Return the progress of a run towards a target.

    Args:
        entries: the run's history.
        target: target of its recipe.
    """
    effective_numbers = {step["step"] for step in history.effective_steps(entries)}
    # In a damaged history, an evaluation can be of a step that is not on record.
    evaluations = [
        e for e in history.surviving_evaluations(entries) if e["step"] in effective_numbers
    ]
    # The target counts as reached at the first such evaluation, even if the metric worsens later.
    first = next((entry for entry in evaluations if is_reached(target, metrics_of(entry))), None)
    newest = first or (evaluations[-1] if evaluations else {})
    value = metrics_of(newest).get(target.metric, math.nan)
    return TimeToTarget(
        **target.model_dump(),
        reached=first is not None,
        value=value if math.isfinite(value) else None,
        **(_counts_at(entries, first) if first else {}),
    )


def _counts_at(entries: Sequence[Entry], evaluation: Entry) -> dict[str, Any]:
    """Return the counts and times of the run at an evaluation."""
    steps = [s for s in history.effective_steps(entries) if s["step"] <= evaluation["step"]]
    groups = attempts(entries)
    # A history whose start is missing is counted from its first entry.
    began = groups[0].entry if groups else entries[0]
    timeline = Timeline(entries, groups)
    return {
        "step": evaluation["step"],
        "samples": steps[-1]["samples"],
        "tokens": steps[-1]["tokens"],
        "seconds": round(timeline.seconds_between(began, evaluation, with_pauses=True), 3),
        "seconds_in_steps": round(sum(step["seconds"] for step in steps), 3),
    }
