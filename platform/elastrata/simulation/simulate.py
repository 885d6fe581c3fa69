"""Simulation of a recipe's run on unreliable workers: goodput, recovery times and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from elastrata.planner.cluster import Cluster
from elastrata.planner.plan import layout_problems, plan
from elastrata.recipe.data_sets import data_spec
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_values import read_text
from elastrata.simulation.trace import Event
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.balance import batches_of_mixture, batches_of_order
from elastrata_pipelines.checked_json import parse_json
from elastrata_pipelines.deal import Ints, assign_least_loaded
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.mixture import MixedOrder
from elastrata_pipelines.storage import Storage

_MOST_BYTES, _MOST_SECONDS = 2**26, 10**9
_KINDS = {
    "killed": "worker killed (SIGKILL)",
    "lost": "node killed",
    "drained": "node drained",
    "joined": "node added",
    "driver": "driver killed",
}


@dataclass(frozen=True, kw_only=True)
class RecoverySeconds:
    """Seconds from the last step before an event to the first step after it.

    The defaults are medians of `benchmarks/results/faults.json` with three nodes on two cores. They
    differ with many workers or a large model; `read_recovery` reads another table.
    """

    killed: float = 9.52
    """A worker process died, its machine is still available."""
    lost: float = 18.37
    """Workers disappeared without notice."""
    drained: float = 10.48
    """Workers will disappear after a notice."""
    joined: float = 13.65
    """Workers join the group."""
    driver: float = 32.95
    """The driver and all in-memory checkpoints are lost, and the job is restarted."""


def read_recovery(path: str) -> RecoverySeconds:
    """Return the medians of a table that `benchmarks/faults.py` wrote.

    Raises:
        UserError: the file does not exist or is not such a table.
    """
    where = f"--recovery: {path}"
    table = parse_json(read_text(Path(path), where, most=_MOST_BYTES), where)
    kinds = table.get("kinds") if isinstance(table, dict) else None
    if not isinstance(kinds, dict):
        raise UserError(f"{where}: expected a table of benchmarks/faults.py, with 'kinds'")
    medians = {name: _find_median(kinds, kind) for name, kind in _KINDS.items()}
    problems = [
        f"{where}: {_KINDS[name]!r}: expected next_step_after_s with a median, in seconds"
        for name, seconds in medians.items()
        if seconds is None
    ]
    if problems:
        raise UserError(*problems)
    return replace(RecoverySeconds(), **{name: s for name, s in medians.items() if s is not None})


def _find_median(kinds: Mapping[str, Any], kind: str) -> float | None:
    try:
        median = kinds[kind]["next_step_after_s"]["median"]
    except (KeyError, TypeError):
        return None
    # In Python a bool is an int.
    is_number = isinstance(median, int | float) and not isinstance(median, bool)
    return float(median) if is_number and 0 <= median <= _MOST_SECONDS else None


_GRAIN = 0.01
"""Numbers of workers that differ by less than this share use the same deal."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Duration of a step."""

    worker_seconds: float
    """Seconds summed over all workers, which are divided among the computing workers."""
    fixed_seconds: float
    """Seconds that do not depend on the number of workers."""


def step_seconds(recipe: Recipe, pace: Pace, *, group: int) -> Callable[[int], float]:
    """Return the seconds of a step as a function of the number of computing workers.

    The duration is that of the slowest worker. The global batch is constant. The imbalance is that
    of its first batch, dealt by the engine's algorithm to each number of workers to within 1%.
    """
    work = recipe.workload.work(data_spec(recipe).vocabulary)
    costs = work(np.sort(_first_lengths(recipe))[::-1])

    # Each deal takes time, so rounding and the cache limit their number.
    @cache
    def imbalance(ranks: int) -> float:
        loads = np.bincount(assign_least_loaded(costs, ranks), weights=costs, minlength=ranks)
        return float(loads.max() / loads.mean())

    def seconds(workers: int) -> float:
        ranks = _round_to_grain(max(1, workers // group))
        return pace.fixed_seconds + imbalance(ranks) * pace.worker_seconds / workers

    return seconds


def _first_lengths(recipe: Recipe) -> Ints:
    """Return the sample lengths of the first batch, or full lengths without a prepared data set."""
    spec = data_spec(recipe)
    if not spec.prepared:
        return np.full(recipe.batch_size, spec.seq_len)
    data = find_training_data(recipe).train
    lengths = [manifest.read_lengths(Storage(url)) for url, manifest in data.data_sets]
    order, size = data.order, recipe.batch_size
    if isinstance(order, MixedOrder):
        return next(iter(batches_of_mixture(lengths, order, batch_size=size, steps=1)))
    return next(iter(batches_of_order(lengths[0], order, batch_size=size, steps=1)))


def plan_pace(recipe: Recipe, cluster: Cluster) -> tuple[Pace, int]:
    """Return the pace of the fastest layout that this version can train, and the workers that
    compute a sample together in it.

    Raises:
        UserError: this version can train under no layout.
    """
    layout_plan = plan(recipe, recipe.parts[0], cluster)
    for forecast in layout_plan.result.families:
        if not layout_problems(recipe, forecast.layout, layout_plan.model.seq_len):
            fixed = forecast.time.messages + forecast.time.update
            worker_seconds = (forecast.time.total - fixed) * cluster.devices
            group = forecast.layout.tensor * forecast.layout.pipeline
            return Pace(worker_seconds=worker_seconds, fixed_seconds=fixed), group
    raise UserError("--step-seconds: missing: this version cannot train with any of the layouts")


def _round_to_grain(ranks: int) -> int:
    """Return the nearest number on a scale with steps of 1%."""
    exponent = round(math.log(ranks) / math.log1p(_GRAIN))
    # Below 100 ranks, neighbouring whole numbers already differ by more than 1%.
    near = round((1 + _GRAIN) ** exponent)
    return near if ranks > 1 / _GRAIN else ranks


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Parameters of a run, and its reactions to faults, which are those of the engine."""

    steps: int
    step_seconds: Callable[[int], float]
    """Duration of a step as a function of the number of computing workers."""
    workers_min: int
    workers_max: int
    group: int = 1
    """Workers that compute a sample together. Only whole groups compute."""
    checkpoint_every: int
    """Steps between durable checkpoints."""
    checkpoint_seconds: float
    """Seconds for which a durable checkpoint blocks training."""
    save_seconds: float
    """Seconds from the start of a durable checkpoint until it is complete."""
    hot_every: int
    """Steps between in-memory checkpoints; 0 disables them."""
    hot_seconds: float
    """Seconds for which an in-memory checkpoint blocks training."""
    hot_save_seconds: float
    """Seconds from the start of an in-memory checkpoint until other processes hold all of it."""
    resize_seconds: float
    """Seconds between checks for additional workers."""
    recovery: RecoverySeconds

    @property
    def all_workers(self) -> int:
        """Largest number of workers in whole groups."""
        return self.workers_max // self.group * self.group


@dataclass(kw_only=True)
class Outcome:
    """Result of a run. Seconds are wall-clock time."""

    finished: bool = False
    steps: int = 0
    seconds: float = 0.0
    worker_seconds: float = 0.0
    """Seconds summed over all available workers. Idle workers count because they are paid for."""
    useful_seconds: float = 0.0
    """Seconds in steps that were not lost."""
    lost_steps: int = 0
    """Steps that were repeated."""
    seconds_again: float = 0.0
    """Seconds of lost steps."""
    seconds_recovering: float = 0.0
    seconds_saving: float = 0.0
    """Seconds for which checkpoints blocked training."""
    seconds_waiting: float = 0.0
    """Seconds with too few workers."""
    faults: dict[str, int] = field(default_factory=dict)
    resizes: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of a time and the number of workers that compute from then on."""

    @property
    def goodput(self) -> float:
        """Share of the time spent in useful steps."""
        return self.useful_seconds / self.seconds if self.seconds else 0.0


class Run:
    """State machine of a run between events."""

    def __init__(self, conditions: Conditions) -> None:
        self.outcome = Outcome()
        self._conditions = conditions
        self._available = self._computing_workers = 0
        self._now = 0.0
        self._busy_until = 0.0
        """End of the recovery during which the group starts."""
        self._steps_done = 0.0
        """Steps, including the computed part of the current one."""
        self._durable_step = self._in_memory_step = 0
        """Newest complete checkpoint of each tier."""
        self._next_resize_check = 0.0

    def replay(self, events: Iterable[Event], seconds: float) -> Outcome:
        """Process events in order until all steps are done or the time is over."""
        for event in events:
            if event.seconds > seconds or self.outcome.finished:
                break
            self._advance(event.seconds)
            if not self.outcome.finished:
                self._handle_event(event)
        self._advance(seconds)
        outcome = self.outcome
        outcome.seconds, outcome.steps = self._now, int(self._steps_done)
        return outcome

    def _handle_event(self, event: Event) -> None:
        """Update the state for one event."""
        outcome = self.outcome
        if event.kind == "join":
            self._available += event.workers
            # A running group takes in new workers at its next resize check.
            if self._computing_workers < self._conditions.workers_min:
                self._start_group(self._conditions.recovery.joined)
            return
        outcome.faults[event.kind] = outcome.faults.get(event.kind, 0) + 1
        if event.kind == "driver":
            # In-memory checkpoints are lost with the driver.
            self._roll_back(self._durable_step)
            self._in_memory_step = self._durable_step
            self._start_group(self._conditions.recovery.driver)
            return
        if event.kind == "kill":
            self._roll_back(max(self._in_memory_step, self._durable_step))
            self._start_group(self._conditions.recovery.killed)
            return
        self._available -= min(event.workers, self._available)
        if self._available >= self._computing_workers:
            return  # the lost workers were idle
        if event.kind == "drain":
            # The notice leaves time to save, so only the current step is lost.
            self._steps_done = float(int(self._steps_done))
            self._in_memory_step = self._durable_step = int(self._steps_done)
            self._start_group(self._conditions.recovery.drained)
        else:
            self._roll_back(max(self._in_memory_step, self._durable_step))
            self._start_group(self._conditions.recovery.lost)

    def _start_group(self, seconds: float) -> None:
        """Start a group with all usable workers, or stop computing if there are too few."""
        at, usable = self._conditions, self._usable_workers()
        size = usable if usable >= at.workers_min else 0
        # A restart with the same number of workers is a recovery, not a resize.
        if size != self._computing_workers:
            self.outcome.sizes.append((self._now, size))
            self.outcome.resizes += 1
        self._computing_workers = size
        self._busy_until = self._now + seconds
        self._next_resize_check = self._busy_until + at.resize_seconds

    def _usable_workers(self) -> int:
        """Return the number of available workers in whole groups."""
        group, most = self._conditions.group, self._conditions.all_workers
        return min(self._available // group * group, most)

    def _roll_back(self, step: int) -> None:
        """Return to a step and count the later ones as lost."""
        lost = int(self._steps_done) - step
        again = (self._steps_done - step) * self._seconds_of_step()
        self.outcome.lost_steps += max(0, lost)
        self.outcome.useful_seconds -= again
        self.outcome.seconds_again += again
        self._steps_done = float(step)

    def _seconds_of_step(self) -> float:
        """Return the current duration of a step; 0 without workers."""
        return (
            self._conditions.step_seconds(self._computing_workers)
            if self._computing_workers
            else 0.0
        )

    def _advance(self, until: float) -> None:
        """Let time pass, and grow the group at resize checks."""
        while self._now < until and not self.outcome.finished:
            resize_check = self._next_resize_check if self._could_grow() else math.inf
            self._pass_time(min(until, max(resize_check, self._now)))
            if self._now >= resize_check and self._could_grow() and not self.outcome.finished:
                # The run saves before it grows, so only the current step is lost.
                self._steps_done = float(int(self._steps_done))
                self._in_memory_step = self._durable_step = int(self._steps_done)
                self._start_group(self._conditions.recovery.joined)

    def _could_grow(self) -> bool:
        """Return whether more workers are usable than compute."""
        return 0 < self._computing_workers < self._usable_workers()

    def _pass_time(self, until: float) -> None:
        """Let time pass without events: waiting, recovering or computing."""
        outcome = self.outcome
        if not self._computing_workers:
            waited = until - self._now
            outcome.seconds_waiting += waited
            self._set_time(until)
            return
        started = min(until, max(self._now, self._busy_until))
        outcome.seconds_recovering += started - self._now
        self._set_time(started)
        self._compute(until - started)

    def _compute(self, seconds: float) -> None:
        """Compute steps for the given time."""
        at, outcome = self._conditions, self.outcome
        step = self._seconds_of_step()
        # The blocking time of checkpoints is spread evenly over steps.
        seconds_blocked = at.checkpoint_seconds / at.checkpoint_every
        seconds_blocked += at.hot_seconds / at.hot_every if at.hot_every else 0.0
        possible = seconds / (step + seconds_blocked)
        done = min(possible, at.steps - self._steps_done)
        if at.steps - self._steps_done <= possible:
            outcome.finished = True
            seconds = done * (step + seconds_blocked)
        outcome.useful_seconds += done * step
        outcome.seconds_saving += done * seconds_blocked
        self._steps_done += done
        self._complete_checkpoints(step + seconds_blocked)
        self._set_time(self._now + seconds)

    def _complete_checkpoints(self, step_seconds: float) -> None:
        """Update the newest complete checkpoints of both tiers."""
        at = self._conditions
        # A checkpoint counts only once it is saved completely, some steps after its start.
        newest_durable = self._steps_done - at.save_seconds / step_seconds
        self._durable_step = max(
            self._durable_step, int(newest_durable) // at.checkpoint_every * at.checkpoint_every
        )
        if at.hot_every:
            newest_in_memory = int(self._steps_done - at.hot_save_seconds / step_seconds)
            self._in_memory_step = max(
                self._in_memory_step, newest_in_memory // at.hot_every * at.hot_every
            )

    def _set_time(self, now: float) -> None:
        """Move the clock and count the paid time."""
        # The run never rents more than `workers_max`.
        paid = min(self._available, self._conditions.workers_max)
        self.outcome.worker_seconds += paid * (now - self._now)
        self._now = now


_HOUR = 3600.0
_STATE_BYTES = 12
"""Bytes per parameter: the fp32 parameter and AdamW's two moments."""
# benchmarks/results/checkpoint.json: 101 MB per rank in 10.7 ms.
_COPIED_PER_SECOND = 9.4e9
"""Bytes per second that a worker copies while training is blocked."""
# benchmarks/results/checkpoint.json: 559 MB/s by two ranks.
_SAVED_PER_SECOND = 0.28e9
"""Bytes per second that a worker writes to storage in the background."""
# benchmarks/results/hot_tier.json: 0.19 s for a negligible size, 0.43 s for 101 MB per rank.
_LEAST_HOT_SECONDS, _SENT_PER_SECOND = 0.19, 0.42e9
"""Latency and bytes per second of a worker's in-memory checkpoint."""
_INTERVAL_FACTORS = tuple(2.0**power for power in range(-4, 5))
"""Checkpoint intervals of a sweep, relative to Young's interval."""

Events = Callable[[], Iterable[Event]]
"""Function that returns an iterator over all events from the start."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Hourly prices of a worker."""

    on_demand: float
    spot: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Simulated run and its comparison with a run without events."""

    outcome: Outcome
    undisturbed_seconds: float
    """Seconds of the completed steps on all workers without interruption."""
    cost: float | None
    """None without prices."""
    cost_on_demand: float | None
    """Cost of the run without events on on-demand workers."""


@dataclass(frozen=True, kw_only=True)
class IntervalSweep:
    """Goodput by the number of steps between durable checkpoints."""

    goodput: dict[int, float]
    best: int
    young: int
    """Interval by Young's formula, in steps."""
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
    """Return the conditions of a recipe's run."""
    # Each worker saves its shard of the state.
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
    """Return the simulation of a run until it is finished or the time is over."""
    outcome = Run(at).replay(events(), seconds)
    alone = outcome.steps * at.step_seconds(at.all_workers)
    cost = on_demand = None
    if prices:
        cost = outcome.worker_seconds * prices.spot / _HOUR
        on_demand = alone * at.workers_max * prices.on_demand / _HOUR
    return Simulation(
        outcome=outcome, undisturbed_seconds=alone, cost=cost, cost_on_demand=on_demand
    )


def sweep(at: Conditions, events: Events, *, seconds: float) -> IntervalSweep | None:
    """Return the goodput for several checkpoint intervals, or None without losses or checkpoint
    costs.

    Args:
        at: conditions of the run.
        events: events of the run.
        seconds: end of the simulation.
    """
    # With in-memory checkpoints, only the loss of the driver returns to a durable one.
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
    goodput = {}
    for interval in sorted({steps(young * factor) for factor in _INTERVAL_FACTORS}):
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
    """Return sqrt(2 d M) (Young 1974, A first order approximation to the optimum checkpoint
    interval).

    Args:
        checkpoint_seconds: d, seconds for which a checkpoint blocks the run.
        seconds_between_faults: M, mean time between faults of the whole run.
    """
    return math.sqrt(2 * checkpoint_seconds * seconds_between_faults)


def daly_seconds(checkpoint_seconds: float, seconds_between_faults: float) -> float:
    """Return the higher-order estimate of Daly (2006, equation 37), which is M if d >= 2 M.

    Args:
        checkpoint_seconds: d, as in `young_seconds`.
        seconds_between_faults: M, as in `young_seconds`.
    """
    d, between = checkpoint_seconds, seconds_between_faults
    if d >= 2 * between:
        return between
    ratio = d / (2 * between)
    return math.sqrt(2 * d * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d
