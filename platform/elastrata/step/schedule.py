"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from elastrata.config import Config

DECAY_RATIO = 0.2
"""A tenth (arXiv 2404.06395) to a fifth (arXiv 2405.18392) of the steps is reported to be as
good as a cosine over all steps."""


class DecayConfig(Config):
    """Decay at the end of the shape `wsd` (warm-up, stable, decay: Hu et al., MiniCPM, arXiv
    2404.06395)."""

    either: ClassVar = (("steps",), ("ratio",))

    shape: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt"
    """Shape of the decay. 1-sqrt: falls with the square root of its finished share, fast at first
    (Hägele et al., arXiv 2405.18392)."""
    steps: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """Length in steps. Either this or `ratio`."""
    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Length as a share of all steps, warm-up included. Default: 0.2."""

    @model_validator(mode="after")
    def _one_length(self) -> DecayConfig:
        if self.steps is not None and self.ratio is not None:
            raise ValueError(
                f"ratio ({self.ratio}): not allowed with steps ({self.steps}), which also "
                "sets the length"
            )
        return self

    def length(self, steps: int) -> int:
        """Return the number of decay steps in a run of `steps`."""
        if self.steps is not None:
            return self.steps
        return max(1, round((self.ratio or DECAY_RATIO) * steps))


class ScheduleConfig(Config):
    """Learning-rate schedule: linear warm-up from 0, then a decay to `final` of the peak.

    MLPerf's BERT (github.com/mlcommons/training) is `shape: polynomial`, `decay_from: first_step`,
    with its poly_power as `power` and its start_warmup_step, negated, as `warmup_offset`.
    """

    either: ClassVar = (("warmup_steps", "warmup_offset"), ("warmup_ratio",))
    only_with: ClassVar = {"power": ("shape", "polynomial"), "decay": ("shape", "wsd")}

    shape: Literal["linear", "cosine", "constant", "polynomial", "wsd"] = "linear"
    """Shape of the decay. constant: stays at the peak. polynomial: the remaining share of steps to
    the power of `power`. wsd: stays at the peak until a short `decay`."""
    power: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Exponent of the shape `polynomial`. 1 equals `linear`; 0.5 stays high for longer."""
    decay: DecayConfig = DecayConfig()
    """Decay at the end of the shape `wsd`."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Steps of the warm-up; the next step is the first at the peak."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Warm-up as a share of all steps, instead of `warmup_steps`; for runs whose length depends on
    the data."""
    warmup_offset: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Number of `warmup_steps` that count as done before the run."""
    decay_from: Literal["warmup_end", "first_step"] = "warmup_end"
    """First step of the decay. first_step: the decay includes the warm-up, so it starts below the
    peak."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate one step after the last, as a share of the peak."""

    @model_validator(mode="after")
    def _sane(self) -> ScheduleConfig:
        if self.power != 1 and self.shape != "polynomial":
            raise ValueError(f"power ({self.power}) is for the shape polynomial, not {self.shape}")
        if self.shape != "wsd" and self.decay != DecayConfig():
            raise ValueError(f"decay is for the shape wsd, not {self.shape}")
        if self.shape == "wsd" and self.decay_from != "warmup_end":
            raise ValueError(
                f"decay_from ({self.decay_from}): the shape wsd has decay.steps or decay.ratio"
            )
        if self.warmup_ratio is not None and (self.warmup_steps or self.warmup_offset):
            raise ValueError(
                f"warmup_ratio ({self.warmup_ratio}): not allowed with warmup_steps or "
                "warmup_offset, which it replaces"
            )
        if self.warmup_offset and self.warmup_offset >= self.warmup_steps:
            raise ValueError(
                f"warmup_offset ({self.warmup_offset}): expected fewer than warmup_steps "
                f"({self.warmup_steps})"
            )
        return self

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps`."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        # At least the last step has the full rate.
        return min(round(self.warmup_ratio * steps), steps - 1)

    def decay_start(self, steps: int) -> int:
        """Return the number of steps before the decay in a run of `steps`."""
        warmup = self.warmup(steps) - self.warmup_offset
        if self.shape == "wsd":
            # A decay that is longer than the rest of the run begins right after the warm-up.
            return max(warmup, steps - self.decay.length(steps))
        return warmup if self.decay_from == "warmup_end" else 0


def learning_rate(config: ScheduleConfig, *, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, in a run of `steps`.

    Warm-up assigns step k the rate peak * (k + 1) / (warmup_steps + 1), starting from k =
    warmup_offset. The decay would reach peak * final at step `steps`, which is never taken.
    """
    warmup_steps = config.warmup(steps)
    warmup = warmup_steps - config.warmup_offset
    if step < warmup:
        # One more than the step, so that no step is wasted at rate 0.
        return peak * (step + config.warmup_offset + 1) / (warmup_steps + 1)
    start = config.decay_start(steps)
    remaining = _remaining_share(config, max(0.0, (step - start) / (steps - start)))
    return peak * (config.final + (1 - config.final) * remaining)


def _remaining_share(config: ScheduleConfig, progress: float) -> float:
    """Return the remaining share of the way from the peak to the final rate, from 1 down to 0."""
    match config.decay.shape if config.shape == "wsd" else config.shape:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "1-sqrt":
            return 1 - math.sqrt(progress)
        case "polynomial":
            return (1 - progress) ** config.power  # type: ignore[no-any-return]
