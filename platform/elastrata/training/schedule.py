"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from elastrata.recipe.config import Config


class ScheduleConfig(Config):
    """How the learning rate moves: linear warm-up from 0, then a decay to `final` of the peak."""

    shape: Literal["linear", "cosine", "constant"] = "linear"
    """Decay from the end of the warm-up to the last step; `constant` stays at the peak."""
    warmup_steps: NonNegativeInt = 0
    """Steps until the peak is reached; the step after them is the first at full rate."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the peak that the decay ends at, one step after the last."""


def learning_rate(config: ScheduleConfig, *, peak: float, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, of a run of `steps`.

    Warm-up gives step k the rate peak * (k + 1) / (warmup_steps + 1). The decay would reach
    peak * final at step `steps`, which is not taken: no step is wasted at rate 0.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    if config.shape == "constant":
        return peak
    done = (step - config.warmup_steps) / (steps - config.warmup_steps)
    left = 1 - done if config.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.final + (1 - config.final) * left)
