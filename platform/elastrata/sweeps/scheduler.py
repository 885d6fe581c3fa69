"""The schedulers of a sweep: they decide which trials continue. They count in tokens."""

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
"""The metric by which schedulers count; it does not depend on the batch size."""
_ASHA_RUNGS, _SHARE_OF_A_TRIAL = 3, 8
_FOREVER: Any = math.inf


class NoneConfig(Config):
    """No early stopping: every trial runs to its end."""

    name: Literal["none"] = "none"
    """No scheduler, the default."""


class AshaConfig(Config):
    """Asynchronous successive halving (Li et al., arXiv 1810.05934): a trial that is not among the
    best 1 / `reduction_factor` at a rung stops there."""

    name: Literal["asha"]
    """Asynchronous successive halving."""
    reduction_factor: Annotated[float, Field(gt=1, le=1e6)] = 3.0
    """Ratio of the tokens of consecutive rungs."""
    grace_tokens: Tokens | None = None
    """Tokens of the first rung. Default: a trial's tokens / `reduction_factor` ** 3."""


class MedianConfig(Config):
    """Median stopping rule (Golovin et al., KDD 2017): a trial stops if its best value is worse
    than the median of the other trials' means up to the same number of tokens."""

    name: Literal["median"]
    """Median stopping rule."""
    grace_tokens: Tokens | None = None
    """Tokens before which no trial stops. Default: 1/8 of a trial's."""
    min_trials: Annotated[int, Field(gt=0, le=10**6)] = 3
    """Minimum number of other trials for a median."""


class PbtConfig(Config):
    """Population based training (Jaderberg et al., arXiv 1711.09846): at regular intervals the
    worst trials copy the state of one of the best and change its values a little."""

    name: Literal["pbt"]
    """Population based training."""
    interval_tokens: Tokens | None = None
    """Tokens between comparisons. Default: 1/8 of a trial's."""
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Share of the trials that counts as the worst, and as the best."""
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Probability that a value is sampled again instead of multiplied by 0.8 or 1.2."""


SchedulerConfig = Annotated[
    NoneConfig | AshaConfig | MedianConfig | PbtConfig, Field(discriminator="name")
]
"""Configuration of one of the schedulers."""


def build_scheduler(
    config: SchedulerConfig,
    space: Mapping[str, Domain],
    *,
    metric: str,
    mode: str,
    trial_tokens: int,
) -> Any:
    """Return the scheduler of Ray Tune for a configuration.

    Args:
        config: the scheduler's configuration.
        space: the domains that population based training changes values in.
        metric: the metric by which trials are compared.
        mode: `min` or `max`.
        trial_tokens: tokens of a trial that runs to its end.
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
                # `max_t` is an estimate: a trial that reaches it may have steps left.
                stop_last_trials=False,
            )
        case MedianConfig():
            return schedulers.MedianStoppingRule(
                **common,
                grace_period=config.grace_tokens or share,
                min_samples_required=config.min_trials,
                # With a finite slice, Tune would pause trials that have too few others to compare
                # with, in favour of waiting ones.
                min_time_slice=_FOREVER,
            )
        case PbtConfig():
            return schedulers.PopulationBasedTraining(
                **common,
                perturbation_interval=config.interval_tokens or share,
                hyperparam_mutations={key: _build_mutation(space[key]) for key in space},
                quantile_fraction=config.quantile,
                resample_probability=config.resample,
                custom_explore_fn=lambda point: clip_to_domains(space, point),
                log_config=False,
            )
    return schedulers.FIFOScheduler()  # type: ignore[no-untyped-call]


def first_rung(config: AshaConfig, trial_tokens: int) -> int:
    """Return the number of tokens before which no trial stops."""
    share = trial_tokens / config.reduction_factor**_ASHA_RUNGS
    return config.grace_tokens or max(1, math.floor(share))


def clip_to_domains(space: Mapping[str, Domain], point: Mapping[str, Value]) -> dict[str, Value]:
    """Return a changed point with every value moved back into its domain."""
    return {
        key: space[key].value_at(min(1.0, max(0.0, space[key].share_of(value))))
        # Tune moves choices and short ranges of whole numbers along the lists of `_build_mutation`.
        if key in space and not _has_list(space[key])
        else value
        for key, value in point.items()
    }


def _build_mutation(domain: Domain) -> list[Value] | Callable[[], Value]:
    """Return Tune's description of how a value changes: a list makes it move to a neighbour, a
    function makes Tune resample it or multiply it by 0.8 or 1.2."""
    if _has_list(domain):
        return list(domain.grid() or ())
    return lambda: domain.value_at(random.random())


def _has_list(domain: Domain) -> bool:
    return isinstance(domain, Choice | Int) and bool(domain.grid())
