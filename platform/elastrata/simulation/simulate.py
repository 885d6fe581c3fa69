"""A recipe's run on workers that come and go: how much of it is work, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from elastrata.planner.cluster import Cluster
from elastrata.planner.plan import plan, problems_of
from elastrata.recipe.data_sets import data_spec
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_values import read_text
from elastrata.simulation.trace import Event
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.balance import mixed_batches, ordered_batches
from elastrata_pipelines.checked_json import parse_json
from elastrata_pipelines.deal import Ints, least_loaded
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
    """From the last step before to the first one after.

    The defaults are the medians of `benchmarks/results/faults.json`: three nodes on two cores. With
    many workers, or a large model, they are others; `read_recovery` takes a table of your own.
    """

    killed: float = 9.52
    """The process of a worker is gone; its machine is there."""
    lost: float = 18.37
    """Workers are gone without notice."""
    drained: float = 10.48
    """Workers are about to go."""
    joined: float = 13.65
    """Workers are taken in."""
    driver: float = 32.95
    """The driver is gone, with all hot copies; the job is started again."""


def read_recovery(path: str) -> RecoverySeconds:
    """The medians of a table that `benchmarks/faults.py` wrote.

    Raises:
        UserError: no such file, or not such a table.
    """
    where = f"--recovery: {path}"
    table = parse_json(read_text(Path(path), where, most=_MOST_BYTES), where)
    kinds = table.get("kinds") if isinstance(table, dict) else None
    if not isinstance(kinds, dict):
        raise UserError(f"{where}: expected a table of benchmarks/faults.py, with 'kinds'")
    medians = {name: _median(kinds, kind) for name, kind in _KINDS.items()}
    problems = [
        f"{where}: {_KINDS[name]!r}: expected next_step_after_s with a median, in seconds"
        for name, seconds in medians.items()
        if seconds is None
    ]
    if problems:
        raise UserError(*problems)
    return replace(RecoverySeconds(), **{name: s for name, s in medians.items() if s is not None})


def _median(kinds: Mapping[str, Any], kind: str) -> float | None:
    try:
        median = kinds[kind]["next_step_after_s"]["median"]
    except (KeyError, TypeError):
        return None
    is_number = isinstance(median, int | float) and not isinstance(median, bool)
    return float(median) if is_number and 0 <= median <= _MOST_SECONDS else None


_GRAIN = 0.01
"""Numbers of workers that differ by less share one deal."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The cost of a step."""

    worker_seconds: float
    """Of a step, over all workers together: it is divided among those that compute."""
    fixed_seconds: float
    """That a step takes however many there are."""


def step_seconds(recipe: Recipe, pace: Pace, *, group: int) -> Callable[[int], float]:
    """Return the seconds of a step by the workers that compute: those of the slowest one.

    The global batch stays what it is; its first one is dealt, by the engine's own order and deal,
    to all numbers of workers that occur, to within 1%."""
    work = recipe.workload.work(data_spec(recipe).vocabulary)
    costs = work(np.sort(_first_lengths(recipe))[::-1])

    @cache
    def imbalance(ranks: int) -> float:
        loads = np.bincount(least_loaded(costs, ranks), weights=costs, minlength=ranks)
        return float(loads.max() / loads.mean())

    def seconds(workers: int) -> float:
        ranks = _coarse(max(1, workers // group))
        return pace.fixed_seconds + imbalance(ranks) * pace.worker_seconds / workers

    return seconds


def _first_lengths(recipe: Recipe) -> Ints:
    """The lengths of the first batch: of full samples where no data set is prepared."""
    spec = data_spec(recipe)
    if not spec.prepared:
        return np.full(recipe.batch_size, spec.seq_len)
    data = training_data(recipe).train
    lengths = [manifest.read_lengths(Storage(url)) for url, manifest in data.data_sets]
    order, size = data.order, recipe.batch_size
    if isinstance(order, MixedOrder):
        return next(iter(mixed_batches(lengths, order, batch_size=size, steps=1)))
    return next(iter(ordered_batches(lengths[0], order, batch_size=size, steps=1)))


def planned_pace(recipe: Recipe, cluster: Cluster) -> tuple[Pace, int]:
    """Return the pace of the fastest layout that this version trains, and how many workers compute
    a sample together in it.

    Raises:
        UserError: it trains under none.
    """
    planned = plan(recipe, recipe.parts[0], cluster)
    for forecast in planned.result.families:
        if not problems_of(recipe, forecast.layout, planned.model.seq_len):
            fixed = forecast.time.messages + forecast.time.update
            together = (forecast.time.total - fixed) * cluster.devices
            group = forecast.layout.tensor * forecast.layout.pipeline
            return Pace(worker_seconds=together, fixed_seconds=fixed), group
    raise UserError("--step-seconds: expected: this version trains under none of the layouts")


def _coarse(ranks: int) -> int:
    """The nearest of numbers that are 1% apart."""
    exponent = round(math.log(ranks) / math.log1p(_GRAIN))
    near = round((1 + _GRAIN) ** exponent)
    return near if ranks > 1 / _GRAIN else ranks


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The sizes of a run, and how it deals with faults: as the engine does."""

    steps: int
    step_seconds: Callable[[int], float]
    """The time of a step, by the workers that compute."""
    workers_min: int
    workers_max: int
    group: int = 1
    """Workers that compute a sample together: they come and go as a whole."""
    checkpoint_every: int
    """Steps between durable checkpoints."""
    checkpoint_seconds: float
    """That a durable checkpoint holds training up."""
    save_seconds: float
    """From its start until it is complete."""
    hot_every: int
    """Steps between hot copies; 0: there are none."""
    hot_seconds: float
    """That a hot copy holds training up."""
    hot_save_seconds: float
    """From its start until it is whole, in other processes' memory."""
    resize_seconds: float
    """Between two looks at whether there are more workers."""
    recovery: RecoverySeconds

    @property
    def all_workers(self) -> int:
        """As many as there may be, in whole groups."""
        return self.workers_max // self.group * self.group


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a run. Seconds are those of the clock."""

    finished: bool = False
    steps: int = 0
    seconds: float = 0.0
    worker_seconds: float = 0.0
    """The time of all workers that were there, idle ones too: it is paid for."""
    useful_seconds: float = 0.0
    """In steps that count."""
    lost_steps: int = 0
    """Done again."""
    seconds_again: float = 0.0
    """In steps that were done again."""
    seconds_recovering: float = 0.0
    seconds_saving: float = 0.0
    """Training was held up by checkpoints and hot copies."""
    seconds_waiting: float = 0.0
    """There were too few workers."""
    faults: dict[str, int] = field(default_factory=dict)
    resizes: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """From when on how many workers computed."""

    @property
    def goodput(self) -> float:
        """Share of the time spent in steps that count."""
        return self.useful_seconds / self.seconds if self.seconds else 0.0


class Run:
    """The state of a run between two events."""

    def __init__(self, conditions: Conditions) -> None:
        self.outcome = Outcome()
        self._conditions = conditions
        self._there = self._computing = 0
        self._now = 0.0
        self._busy_until = 0.0
        """Before it, a group of workers is being started."""
        self._done = 0.0
        """Steps, with the part of the one that is computed."""
        self._durable = self._hot = 0
        """The newest step of each tier's copies."""
        self._next_look = 0.0

    def replay(self, events: Iterable[Event], seconds: float) -> Outcome:
        """Goes through events, in order, until all steps are done or the time is up."""
        for event in events:
            if event.seconds > seconds or self.outcome.finished:
                break
            self._advance(event.seconds)
            if not self.outcome.finished:
                self._meet(event)
        self._advance(seconds)
        outcome = self.outcome
        outcome.seconds, outcome.steps = self._now, int(self._done)
        return outcome

    def _meet(self, event: Event) -> None:
        outcome = self.outcome
        if event.kind == "join":
            self._there += event.workers
            if self._computing < self._conditions.workers_min:
                self._start_group(self._conditions.recovery.joined)
            return
        outcome.faults[event.kind] = outcome.faults.get(event.kind, 0) + 1
        if event.kind == "driver":
            self._roll_back(self._durable)
            self._hot = self._durable
            self._start_group(self._conditions.recovery.driver)
            return
        if event.kind == "kill":
            self._roll_back(max(self._hot, self._durable))
            self._start_group(self._conditions.recovery.killed)
            return
        self._there -= min(event.workers, self._there)
        if self._there >= self._computing:
            return  # they were idle
        if event.kind == "drain":
            self._done = float(int(self._done))
            self._hot = self._durable = int(self._done)
            self._start_group(self._conditions.recovery.drained)
        else:
            self._roll_back(max(self._hot, self._durable))
            self._start_group(self._conditions.recovery.lost)

    def _start_group(self, seconds: float) -> None:
        """As many workers as there are, in whole groups; none where there are too few."""
        at, usable = self._conditions, self._usable()
        size = usable if usable >= at.workers_min else 0
        if size != self._computing:
            self.outcome.sizes.append((self._now, size))
            self.outcome.resizes += 1
        self._computing = size
        self._busy_until = self._now + seconds
        self._next_look = self._busy_until + at.resize_seconds

    def _usable(self) -> int:
        """Workers that are there, in whole groups."""
        group, most = self._conditions.group, self._conditions.all_workers
        return min(self._there // group * group, most)

    def _roll_back(self, step: int) -> None:
        lost = int(self._done) - step
        again = (self._done - step) * self._seconds_of_step()
        self.outcome.lost_steps += max(0, lost)
        self.outcome.useful_seconds -= again
        self.outcome.seconds_again += again
        self._done = float(step)

    def _seconds_of_step(self) -> float:
        return self._conditions.step_seconds(self._computing) if self._computing else 0.0

    def _advance(self, until: float) -> None:
        """Lets time pass, with looks at more workers where there are some."""
        while self._now < until and not self.outcome.finished:
            look = self._next_look if self._could_grow() else math.inf
            self._pass(min(until, max(look, self._now)))
            if self._now >= look and self._could_grow() and not self.outcome.finished:
                self._done = float(int(self._done))
                self._hot = self._durable = int(self._done)
                self._start_group(self._conditions.recovery.joined)

    def _could_grow(self) -> bool:
        return 0 < self._computing < self._usable()

    def _pass(self, until: float) -> None:
        """A time in which nothing happens but steps."""
        outcome = self.outcome
        if not self._computing:
            waited = until - self._now
            outcome.seconds_waiting += waited
            self._to(until)
            return
        started = min(until, max(self._now, self._busy_until))
        outcome.seconds_recovering += started - self._now
        self._to(started)
        self._compute(until - started)

    def _compute(self, seconds: float) -> None:
        """Steps, with what copies hold them up spread over them."""
        at, outcome = self._conditions, self.outcome
        step = self._seconds_of_step()
        held_up = at.checkpoint_seconds / at.checkpoint_every
        held_up += at.hot_seconds / at.hot_every if at.hot_every else 0.0
        possible = seconds / (step + held_up)
        done = min(possible, at.steps - self._done)
        if at.steps - self._done <= possible:
            outcome.finished = True
            seconds = done * (step + held_up)
        outcome.useful_seconds += done * step
        outcome.seconds_saving += done * held_up
        self._done += done
        self._copied(step + held_up)
        self._to(self._now + seconds)

    def _copied(self, step_seconds: float) -> None:
        """The newest copies that are complete by now."""
        at = self._conditions
        complete = self._done - at.save_seconds / step_seconds
        self._durable = max(
            self._durable, int(complete) // at.checkpoint_every * at.checkpoint_every
        )
        if at.hot_every:
            whole = int(self._done - at.hot_save_seconds / step_seconds)
            self._hot = max(self._hot, whole // at.hot_every * at.hot_every)

    def _to(self, now: float) -> None:
        paid = min(self._there, self._conditions.workers_max)
        self.outcome.worker_seconds += paid * (now - self._now)
        self._now = now


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
    """The conditions that a recipe gives its run."""
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
    alone = outcome.steps * at.step_seconds(at.all_workers)
    cost = on_demand = None
    if prices:
        cost = outcome.worker_seconds * prices.spot / _HOUR
        on_demand = alone * at.workers_max * prices.on_demand / _HOUR
    return Simulation(
        outcome=outcome, undisturbed_seconds=alone, cost=cost, cost_on_demand=on_demand
    )


def sweep(at: Conditions, events: Events, *, seconds: float) -> IntervalSweep | None:
    """The goodput with durable checkpoints more and less often; None where nothing is lost, or a
    checkpoint costs nothing.

    Args:
        at: the run's conditions. Where there are hot copies, only the loss of the driver goes back
            to a durable checkpoint.
        events: what happens.
        seconds: until when.
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
    goodput = {}
    for interval in sorted({steps(young * factor) for factor in _TRIED}):
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
