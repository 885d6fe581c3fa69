"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from elastrata.config import Config


class ScheduleConfig(Config):
    """How the learning rate moves: linear warm-up from 0, then a decay to `final` of the peak."""

    shape: Literal["linear", "cosine", "constant"] = "linear"
    """Decay from the end of the warm-up to the last step; `constant` stays at the peak."""
    warmup_steps: NonNegativeInt = 0
    """Steps until the peak is reached; the step after them is the first at full rate."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the peak that is left at the last step."""


def learning_rate(config: ScheduleConfig, *, peak: float, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, of a run of `steps`.

    Warm-up gives step k the rate peak * (k + 1) / (warmup_steps + 1), so that no step is wasted at
    rate 0; the last step of the run has exactly peak * final (peak, where constant).
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    if config.shape == "constant":
        return peak
    decaying = steps - 1 - config.warmup_steps
    done = (step - config.warmup_steps) / decaying if decaying > 0 else 1.0
    left = 1 - done if config.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.final + (1 - config.final) * left)
