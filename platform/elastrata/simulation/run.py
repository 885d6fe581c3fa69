"""A run in simulated time: from event to event, never step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastrata.simulation.recovery import RecoverySeconds
from elastrata.simulation.trace import Event

_HOUR = 3600.0
Sizes = tuple[int, ...]
"""Workers of each kind of device."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The sizes of a run, and how it deals with faults: as the engine does."""

    steps: int
    step_seconds: Callable[[Sizes], float]
    """The time of a step, by the workers that compute."""
    workers_min: int
    workers_max: Sizes
    group: int = 1
    """Workers of one kind that compute a sample together: they come and go as a whole."""
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
    def all_workers(self) -> Sizes:
        """As many as there may be, in whole groups."""
        return tuple(most // self.group * self.group for most in self.workers_max)


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a run. Seconds are those of the clock."""

    finished: bool = False
    steps: int = 0
    seconds: float = 0.0
    worker_seconds: float = 0.0
    """The time of all workers that were there, idle ones too: it is paid for."""
    worker_seconds_by_kind: list[float] = field(default_factory=list)
    """Of each kind of device."""
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
        kinds = len(conditions.workers_max)
        self.outcome = Outcome(worker_seconds_by_kind=[0.0] * kinds)
        self._conditions = conditions
        self._there = [0] * kinds
        self._computing: Sizes = (0,) * kinds
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
            self._there[event.device] += event.workers
            if sum(self._computing) < self._conditions.workers_min:
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
        self._there[event.device] -= min(event.workers, self._there[event.device])
        if self._there[event.device] >= self._computing[event.device]:
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
        sizes = usable if sum(usable) >= at.workers_min else (0,) * len(usable)
        if sizes != self._computing:
            self.outcome.sizes.append((self._now, sum(sizes)))
            self.outcome.resizes += 1
        self._computing = sizes
        self._busy_until = self._now + seconds
        self._next_look = self._busy_until + at.resize_seconds

    def _usable(self) -> Sizes:
        """Workers that are there, in whole groups."""
        group, most = self._conditions.group, self._conditions.all_workers
        return tuple(map(min, [there // group * group for there in self._there], most))

    def _roll_back(self, step: int) -> None:
        lost = int(self._done) - step
        again = (self._done - step) * self._seconds_of_step()
        self.outcome.lost_steps += max(0, lost)
        self.outcome.useful_seconds -= again
        self.outcome.seconds_again += again
        self._done = float(step)

    def _seconds_of_step(self) -> float:
        return self._conditions.step_seconds(self._computing) if any(self._computing) else 0.0

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
        return 0 < sum(self._computing) < sum(self._usable())

    def _pass(self, until: float) -> None:
        """A time in which nothing happens but steps."""
        outcome = self.outcome
        if not any(self._computing):
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
        for kind, most in enumerate(self._conditions.workers_max):
            paid = min(self._there[kind], most) * (now - self._now)
            self.outcome.worker_seconds_by_kind[kind] += paid
            self.outcome.worker_seconds += paid
        self._now = now
