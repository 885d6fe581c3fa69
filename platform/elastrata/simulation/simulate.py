"""A recipe's run on workers that come and go: how much of it is work, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastrata.recipe.recipe import Recipe
from elastrata.simulation.interval import daly_seconds, young_seconds
from elastrata.simulation.recovery import RecoverySeconds
from elastrata.simulation.run import Conditions, Outcome, Run
from elastrata.simulation.trace import Event

_HOUR = 3600.0
_STATE_BYTES = 12
"""Of a parameter: itself in fp32 and AdamW's two moments."""
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
"""What happens, from the beginning each time."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Of a worker for an hour."""

    on_demand: float
    spot: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated run beside one that nothing happens to."""

    outcome: Outcome
    undisturbed_seconds: float
    """Of the steps that were done, on all workers throughout."""
    cost: float | None
    """None where there are no prices."""
    cost_on_demand: float | None
    """Of the undisturbed run."""


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
    """What a recipe says about its run.

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
