"""The time to target: when, and after what, a run reached its target, as its history tells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastrata.core.target import TargetConfig, reached
from elastrata.run import history
from elastrata.run.attempts import attempts
from elastrata.run.entries import metrics_of
from elastrata.run.timeline import Timeline

Entry = Mapping[str, Any]


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
