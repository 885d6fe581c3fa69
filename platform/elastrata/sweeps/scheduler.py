"""The schedulers of a sweep: which trials continue, counted in tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from elastrata.config import Config
from elastrata.sweeps.space import Choice, Domain, Int, Value

Tokens = Annotated[int, Field(gt=0, le=10**18)]
TOKENS = "progress/tokens"
"""The metric by which schedulers count: it is the same whatever the batch size."""
_ASHA_RUNGS, _SHARE_OF_A_TRIAL = 3, 8
_FOREVER: Any = math.inf


class NoneConfig(Config):
    """Every trial runs to its end."""

    name: Literal["none"] = "none"
    """This scheduler; the default."""


class AshaConfig(Config):
    """Asynchronous successive halving (Li et al., arXiv 1810.05934): a trial that is not among the
    best 1 / `reduction_factor` at a rung stops there."""

    name: Literal["asha"]
    """This scheduler."""
    reduction_factor: Annotated[float, Field(gt=1, le=1e6)] = 3.0
    """Rungs are this factor apart, in tokens."""
    grace_tokens: Tokens | None = None
    """The first rung. Default: that of a trial's tokens over the third power of the factor."""


class MedianConfig(Config):
    """The median stopping rule (Golovin et al., KDD 2017): a trial stops whose best value is worse
    than the median of the others' means up to that many tokens."""

    name: Literal["median"]
    """This scheduler."""
    grace_tokens: Tokens | None = None
    """No trial stops before. Default: an eighth of a trial's tokens."""
    min_trials: Annotated[int, Field(gt=0, le=10**6)] = 3
    """There is no median of fewer other trials."""


class PbtConfig(Config):
    """Population based training (Jaderberg et al., arXiv 1711.09846): every so often the worst
    trials take over the state of one of the best, with its values changed a little."""

    name: Literal["pbt"]
    """This scheduler."""
    interval_tokens: Tokens | None = None
    """From one look to the next. Default: an eighth of a trial's tokens."""
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """The share of the trials that are the worst, and the best."""
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25
    """How often a value is drawn anew instead of multiplied with 0.8 or 1.2."""


SchedulerConfig = Annotated[
    NoneConfig | AshaConfig | MedianConfig | PbtConfig, Field(discriminator="name")
]
"""One of the schedulers."""


def build_scheduler(
    config: SchedulerConfig,
    space: Mapping[str, Domain],
    *,
    metric: str,
    mode: str,
    trial_tokens: int,
) -> Any:
    """Ray Tune's scheduler.

    Args:
        config: which one.
        space: what population based training changes.
        metric: what trials are compared by.
        mode: `min` or `max`.
        trial_tokens: of a trial that runs to its end.
    """
    from ray.tune import schedulers

    common: dict[str, Any] = {"time_attr": TOKENS, "metric": metric, "mode": mode}
    share = max(1, trial_tokens // _SHARE_OF_A_TRIAL)
    match config:
        case AshaConfig():
            grace = first_rung(config, trial_tokens)
            return schedulers.ASHAScheduler(
                **common,
                max_t=max(trial_tokens, grace),
                grace_period=grace,
                reduction_factor=config.reduction_factor,
                stop_last_trials=False,
            )
        case MedianConfig():
            return schedulers.MedianStoppingRule(
                **common,
                grace_period=config.grace_tokens or share,
                min_samples_required=config.min_trials,
                # Where any time will do, trials wait for others instead of going on.
                min_time_slice=_FOREVER,
            )
        case PbtConfig():
            return schedulers.PopulationBasedTraining(
                **common,
                perturbation_interval=config.interval_tokens or share,
                hyperparam_mutations={key: _mutation(space[key]) for key in space},
                quantile_fraction=config.quantile,
                resample_probability=config.resample,
                custom_explore_fn=lambda point: within(space, point),
                log_config=False,
            )
    return schedulers.FIFOScheduler()  # type: ignore[no-untyped-call]


def first_rung(config: AshaConfig, trial_tokens: int) -> int:
    """Tokens before which no trial stops."""
    share = trial_tokens / config.reduction_factor**_ASHA_RUNGS
    return config.grace_tokens or max(1, math.floor(share))


def within(space: Mapping[str, Domain], point: Mapping[str, Value]) -> dict[str, Value]:
    """A changed point, every value back inside its domain."""
    return {
        key: space[key].value_at(min(1.0, max(0.0, space[key].share_of(value))))
        if key in space and not isinstance(space[key], Choice | Int)
        else value
        for key, value in point.items()
    }


def _mutation(domain: Domain) -> list[Value] | Callable[[], Value]:
    """How a value changes: to one beside it where there are few, else drawn or multiplied."""
    if isinstance(domain, Choice | Int) and (values := domain.grid()):
        return list(values)
    return lambda: domain.value_at(random.random())
