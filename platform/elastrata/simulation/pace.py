"""The pace of a run's steps on the workers that there are: as planned, and as the engine deals."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from elastrata.bench.balance import batches_of_lengths
from elastrata.planner.cluster import Cluster
from elastrata.planner.mixed_plan import dealt_forecasts
from elastrata.planner.plan import plan, problems_of
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.recipe import Recipe
from elastrata.simulation.run import Sizes
from elastrata_pipelines.deal import least_loaded
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.speeds import FULL_SPEED, quantized
from elastrata_pipelines.uneven_shares import soonest

_GRAIN = 0.01
"""Numbers of workers that differ by less share one deal."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The cost of a step."""

    steps_per_second: tuple[float, ...]
    """Of a worker of each kind of device, by itself: steps without what follows."""
    fixed_seconds: float
    """That a step takes however many there are."""


def step_seconds(recipe: Recipe, pace: Pace, *, group: int) -> Callable[[Sizes], float]:
    """Seconds of a step by the workers that compute: those of the one that takes longest.

    The global batch stays what it is; its first one is dealt, by the engine's own order and deal,
    to all numbers of workers that occur, to within 1%: by speed, or to equal hands where that is
    what the recipe's `workers.speeds` says.

    Args:
        recipe: its data, batch and model.
        pace: of its steps.
        group: workers that compute a sample together.
    """
    imbalance = time_imbalance(recipe, pace, group=group)

    def seconds(workers: Sizes) -> float:
        together = float(sum(map(operator.mul, workers, pace.steps_per_second)))
        return pace.fixed_seconds + imbalance(workers) / together

    return seconds


def time_imbalance(
    recipe: Recipe, pace: Pace, *, group: int, is_equal: bool | None = None
) -> Callable[[Sizes], float]:
    """Seconds of the rank that takes longest over those of all work at the speed of all ranks, by
    the workers that compute.

    Args:
        recipe: its data, batch and model.
        pace: of its steps.
        group: workers that compute a sample together.
        is_equal: whether hands are equal; default: as the recipe has it.
    """
    batches = batches_of_lengths(recipe, None)
    work = recipe.workload.work(data_spec(recipe).vocabulary)
    lengths = next(iter(batches(recipe.batch_size)))
    costs = work(np.sort(lengths)[::-1])
    by_speed = not (recipe.workers.speeds == "equal" if is_equal is None else is_equal)

    @cache
    def of_ranks(ranks: Sizes) -> float:
        rates = np.repeat(pace.steps_per_second, ranks)
        speeds = quantized(rates.tolist()) if by_speed else ()
        if len(set(speeds)) > 1:
            dealt = soonest(costs, np.array(speeds) / FULL_SPEED)
        else:
            dealt = least_loaded(costs, len(rates))
        loads = np.bincount(dealt, weights=costs, minlength=len(rates))
        return float((loads / rates).max() * rates.sum() / loads.sum())

    def imbalance(workers: Sizes) -> float:
        ranks = [_coarse(count // group) if count // group else 0 for count in workers]
        return of_ranks(tuple(ranks) if any(ranks) else (1, *ranks[1:]))

    return imbalance


def given_pace(seconds: float, kinds: Sequence[Cluster]) -> Pace:
    """The pace of which a step on all devices takes so long; several kinds share it by their peaks.

    Args:
        seconds: of a step.
        kinds: of devices.
    """
    peaks = [kind.device.peak_flops for kind in kinds]
    whole = sum(kind.devices * peak for kind, peak in zip(kinds, peaks, strict=True))
    each = tuple(peak / (whole * seconds) for peak in peaks)
    return Pace(steps_per_second=each, fixed_seconds=0.0)


def planned_pace(recipe: Recipe, kinds: Sequence[Cluster]) -> tuple[Pace, int]:
    """The pace of the fastest layout that this version trains, and how many workers compute a
    sample together in it. On several kinds of devices it is one without stages: their samples are
    dealt by speed.

    Args:
        recipe: of the run.
        kinds: of devices.

    Raises:
        UserError: it trains under none.
    """
    if len(kinds) > 1:
        return _mixed_pace(recipe, kinds)
    planned = plan(recipe, recipe.parts[0], kinds[0])
    for forecast in planned.result.families:
        if not problems_of(recipe, forecast.layout, planned.model.seq_len):
            fixed = forecast.time.messages + forecast.time.update
            each = 1 / ((forecast.time.total - fixed) * kinds[0].devices)
            group = forecast.layout.tensor * forecast.layout.pipeline
            return Pace(steps_per_second=(each,), fixed_seconds=fixed), group
    raise _no_layout()


def _mixed_pace(recipe: Recipe, kinds: Sequence[Cluster]) -> tuple[Pace, int]:
    model, forecasts = dealt_forecasts(recipe, recipe.parts[0], kinds)
    for forecast in forecasts:
        if not problems_of(recipe, forecast.layout, model.seq_len):
            fixed = forecast.time.messages + forecast.time.update
            computed = forecast.time.total - fixed
            each = tuple(part.share / (part.devices * computed) for part in forecast.parts)
            return Pace(steps_per_second=each, fixed_seconds=fixed), forecast.layout.tensor
    raise _no_layout()


def _no_layout() -> UserError:
    return UserError("--step-seconds: expected: this version trains under none of the layouts")


def _coarse(ranks: int) -> int:
    """The nearest of numbers that are 1% apart."""
    exponent = round(math.log(ranks) / math.log1p(_GRAIN))
    near = round((1 + _GRAIN) ** exponent)
    return near if ranks > 1 / _GRAIN else ranks
