"""Seconds of a step by number of workers, with the imbalance that the deal leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from elastrata.bench.balance import batches_of_lengths
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.deal import least_loaded

_GRAIN = 0.01
"""Numbers of workers that differ by less share one deal."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a step costs."""

    worker_seconds: float
    """That all workers together compute."""
    fixed_seconds: float
    """That a step takes however many there are."""


def step_seconds(recipe: Recipe, pace: Pace, *, group: int) -> Callable[[int], float]:
    """Seconds of a step by number of workers: the work of the one that was dealt most.

    The global batch stays what it is; its first one is dealt, by the engine's own order and deal,
    to every number of workers that occurs, to within 1%.

    Args:
        recipe: its data, batch and model.
        pace: of its steps.
        group: workers that compute a sample together.
    """
    batches = batches_of_lengths(recipe, None)
    work = recipe.workload.work(data_spec(recipe).vocabulary)
    lengths = next(iter(batches(recipe.batch_size)))
    costs = work(np.sort(lengths)[::-1])

    @cache
    def imbalance(ranks: int) -> float:
        loads = np.bincount(least_loaded(costs, ranks), weights=costs, minlength=ranks)
        return float(loads.max() / loads.mean())

    def seconds(workers: int) -> float:
        ranks = max(1, workers // group)
        computed = pace.worker_seconds / workers * imbalance(_coarse(ranks))
        return pace.fixed_seconds + computed

    return seconds


def _coarse(ranks: int) -> int:
    """The nearest of numbers that are 1% apart."""
    place = round(math.log(ranks) / math.log1p(_GRAIN))
    near = round((1 + _GRAIN) ** place)
    return near if ranks > 1 / _GRAIN else ranks
