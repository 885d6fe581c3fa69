"""A recipe's run on workers that come and go: how much of it is work, and what it costs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastrata.recipe.recipe import Recipe
from elastrata.simulation.recovery import RecoverySeconds
from elastrata.simulation.run import Conditions, Outcome, Run, Sizes
from elastrata.simulation.trace import Event

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
    """The price of a worker of each kind of device for an hour."""

    on_demand: tuple[float, ...]
    spot: tuple[float, ...]


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
    step_seconds: Callable[[Sizes], float],
    recovery: RecoverySeconds,
    *,
    parameters: int,
    workers: Sizes,
    group: int,
) -> Conditions:
    """The conditions that a recipe gives its run.

    Args:
        recipe: that is trained.
        step_seconds: by the workers that compute.
        recovery: seconds by what happened.
        parameters: of its model.
        workers: of each kind of device, as many as it may have.
        group: that compute a sample together.
    """
    own = _STATE_BYTES * parameters / sum(workers)
    return Conditions(
        steps=recipe.steps_in_all,
        step_seconds=step_seconds,
        workers_min=min(max(recipe.workers.min, group), sum(workers)),
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
    alone = outcome.steps * at.step_seconds(at.all_workers)
    cost = on_demand = None
    if prices:
        cost = sum(map(operator.mul, outcome.worker_seconds_by_kind, prices.spot)) / _HOUR
        hourly = sum(map(operator.mul, at.workers_max, prices.on_demand))
        on_demand = alone * hourly / _HOUR
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
    step = at.step_seconds(at.all_workers)

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
