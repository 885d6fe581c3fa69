"""A recipe's run on workers that come and go: how much of it is work, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from elastrata.bench.balance import batches_of_lengths
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.recipe import Recipe
from elastrata.simulation.recovery import RecoverySeconds
from elastrata.simulation.run import Conditions, Outcome, Run
from elastrata.simulation.trace import Event
from elastrata_pipelines.deal import least_loaded

_GRAIN = 0.01
"""Numbers of workers that differ by less share one deal."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The cost of a step."""

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
    exponent = round(math.log(ranks) / math.log1p(_GRAIN))
    near = round((1 + _GRAIN) ** exponent)
    return near if ranks > 1 / _GRAIN else ranks


_HOUR = 3600.0
_STATE_BYTES = 12
"""The size of a parameter's state: itself in fp32 and AdamW's two moments."""
_COPIED_PER_SECOND = 9.4e9
"""Bytes a worker copies aside while training stands still: benchmarks/results/checkpoint.json,
101 MB a rank in 10.7 ms."""
_SAVED_PER_SECOND = 0.28e9
"""Bytes a worker writes to storage, in the background: the same, 559 MB/s by two ranks."""
_LEAST_HOT_SECONDS, _SENT_PER_SECOND = 0.19, 0.42e9
"""Until a hot copy is whole: benchmarks/results/hot_tier.json, 0.19 s for next to nothing, 0.43 s
for 101 MB a rank."""
_TRIED = tuple(2.0**power for power in range(-4, 5))
"""Intervals over the one that Young's formula gives."""

Events = Callable[[], Iterable[Event]]
"""The events, from the beginning each time."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The price of a worker for an hour."""

    on_demand: float
    spot: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated run beside one that nothing happens to."""

    outcome: Outcome
    undisturbed_seconds: float
    """The time of the steps that were done, on all workers throughout."""
    cost: float | None
    """None where there are no prices."""
    cost_on_demand: float | None
    """The cost of the undisturbed run."""


@dataclass(frozen=True, kw_only=True)
class IntervalSweep:
    """The goodput by steps between durable checkpoints."""

    goodput: dict[int, float]
    best: int
    young: int
    """Steps, by the formula."""
    daly: int
    seconds_between_faults: float


def conditions(
    recipe: Recipe,
    step_seconds: Callable[[int], float],
    recovery: RecoverySeconds,
    *,
    parameters: int,
    workers: int,
    group: int,
) -> Conditions:
    """The conditions that a recipe gives its run.

    Args:
        recipe: that is trained.
        step_seconds: by number of workers.
        recovery: seconds by what happened.
        parameters: of its model.
        workers: as many as it may have.
        group: that compute a sample together.
    """
    own = _STATE_BYTES * parameters / workers
    return Conditions(
        steps=recipe.steps_in_all,
        step_seconds=step_seconds,
        workers_min=min(max(recipe.workers.min, group), workers),
        workers_max=workers,
        group=group,
        checkpoint_every=recipe.checkpoint.every,
        checkpoint_seconds=own / _COPIED_PER_SECOND,
        save_seconds=own / _SAVED_PER_SECOND,
        hot_every=recipe.checkpoint.hot_every if recipe.checkpoint.hot_steps else 0,
        hot_seconds=own / _COPIED_PER_SECOND,
        hot_save_seconds=_LEAST_HOT_SECONDS + own / _SENT_PER_SECOND,
        resize_seconds=recipe.workers.resize_seconds,
        recovery=recovery,
    )


def simulate(
    at: Conditions, events: Events, *, seconds: float, prices: Prices | None
) -> Simulation:
    """Replays a run until it is done, or the time is up."""
    outcome = Run(at).replay(events(), seconds)
    alone = outcome.steps * at.step_seconds(at.workers_max // at.group * at.group)
    cost = on_demand = None
    if prices:
        cost = outcome.worker_seconds / _HOUR * prices.spot
        on_demand = alone * at.workers_max / _HOUR * prices.on_demand
    return Simulation(
        outcome=outcome, undisturbed_seconds=alone, cost=cost, cost_on_demand=on_demand
    )


def sweep(
    at: Conditions, events: Events, *, seconds: float, factors: Sequence[float] = ()
) -> IntervalSweep | None:
    """The goodput with durable checkpoints more and less often; None where nothing is lost, or a
    checkpoint costs nothing.

    Args:
        at: the run's conditions. Where there are hot copies, only the loss of the driver goes back
            to a durable checkpoint.
        events: what happens.
        seconds: until when.
        factors: intervals over Young's that are tried.
    """
    kinds = ("driver",) if at.hot_every else ("driver", "lose")
    first = Run(at).replay(events(), seconds)
    faults = sum(first.faults.get(kind, 0) for kind in kinds)
    if not faults or not at.checkpoint_seconds:
        return None
    between = first.seconds / faults
    step = at.step_seconds(at.workers_max // at.group * at.group)

    def steps(interval: float) -> int:
        return max(1, round(interval / step))

    young = young_seconds(at.checkpoint_seconds, between)
    tried = factors or _TRIED
    goodput = {}
    for interval in sorted({steps(young * factor) for factor in tried}):
        other = replace(at, checkpoint_every=interval)
        goodput[interval] = Run(other).replay(events(), seconds).goodput
    return IntervalSweep(
        goodput=goodput,
        best=max(goodput, key=lambda interval: goodput[interval]),
        young=steps(young),
        daly=steps(daly_seconds(at.checkpoint_seconds, between)),
        seconds_between_faults=between,
    )


def young_seconds(checkpoint_seconds: float, seconds_between_faults: float) -> float:
    """sqrt(2 d M) (Young 1974, A first order approximation to the optimum checkpoint interval).

    Args:
        checkpoint_seconds: d, that a checkpoint keeps the run from computing.
        seconds_between_faults: M, mean, of the whole run.
    """
    return math.sqrt(2 * checkpoint_seconds * seconds_between_faults)


def daly_seconds(checkpoint_seconds: float, seconds_between_faults: float) -> float:
    """The higher-order estimate of Daly (2006, equation 37), M where d is 2 M and more.

    Args:
        checkpoint_seconds: d.
        seconds_between_faults: M.
    """
    d, between = checkpoint_seconds, seconds_between_faults
    if d >= 2 * between:
        return between
    ratio = d / (2 * between)
    return math.sqrt(2 * d * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d
