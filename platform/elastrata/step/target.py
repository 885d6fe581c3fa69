"""The target: a value of a metric at which a run is finished."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from elastrata.config import Config

Finite = Annotated[float, Field(allow_inf_nan=False)]


class TargetConfig(Config):
    """Target value of a metric. The run ends when an evaluation reaches it, and its record
    states the time."""

    either: ClassVar = (("at_least",), ("at_most",))

    metric: str
    """Evaluation metric: `eval/loss`, one of the workload's, such as `eval/mlm_accuracy`, or
    `eval/NAME/loss` of one of `evaluation.sets`."""
    at_least: Finite | None = None
    """Value that the metric must reach or exceed. Either this or `at_most`."""
    at_most: Finite | None = None
    """Value that the metric must reach or fall below."""

    @model_validator(mode="after")
    def _one_bound(self) -> TargetConfig:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("needs either at_least (such as 0.72) or at_most")
        return self


def is_reached(target: TargetConfig | None, metrics: Mapping[str, float]) -> bool:
    """Return whether an evaluation reached the target; always false without an evaluation."""
    # A diverged loss must not count as reached, nor a metric that was not evaluated.
    if target is None or not math.isfinite(value := metrics.get(target.metric, math.nan)):
        return False
    if target.at_least is not None:
        return value >= target.at_least
    return target.at_most is not None and value <= target.at_most


def is_over(
    step: int, metrics: Mapping[str, float], *, steps: int, target: TargetConfig | None
) -> bool:
    """Return whether a run ends with this step."""
    return step >= steps or is_reached(target, metrics)
