"""Lives of runs whose clocks jump: what their seconds went into, and what the clocks wrote."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from elastrata.run.goodput import Goodput
from elastrata.run.history import HistoryWriter
from elastrata.run.status import Status
from elastrata_pipelines.storage import Storage
from support.histories import Entry, started, stepped

BEGAN = 1_700_000_000.0
_JUMPS = (-86_400.0, -3_600.0, -7.0, 5.0, 3_600.0, 86_400.0)


@dataclass
class Life:
    """A run that is trained, evaluated, killed, resized, stopped and continued, at random.

    Args:
        rng: decides.
        hosts: of rank 0 and the driver, each with clocks of its own.
        has_readings: whether entries have readings of a monotonic clock, as those of old have not.
        jumps: whether wall clocks are set back and forth.
    """

    rng: random.Random
    hosts: int = 1
    has_readings: bool = True
    jumps: bool = True
    now: float = 0.0
    entries: list[Entry] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)
    """The true seconds, by the names of `Goodput`."""
    last: int = 0
    """The newest step that counts."""
    launch: int = 1
    """The number of the first attempt of the launch."""

    def __post_init__(self) -> None:
        self._offsets = [self.rng.uniform(-60, 60) if self.hosts > 1 else 0.0] * self.hosts
        for attempt in range(1, self.rng.randint(1, 4) + 1):
            self._live(attempt, is_last=False)
        self._live(attempt + 1, is_last=True)

    def _spend(self, use: str, longest: float) -> float:
        seconds = round(self.rng.uniform(0.01, longest), 3)
        self.now += seconds
        self.uses[use] += seconds
        return seconds

    def _write(self, entry: Entry, host: int) -> None:
        if self.jumps and self.rng.random() < 0.2:
            self._offsets[host] += self.rng.choice(_JUMPS)
        entry["time"] = BEGAN + self.now + self._offsets[host]
        if self.has_readings:
            entry |= {"clock": f"host-{host}", "monotonic": 1e5 * (host + 1) + self.now}
        self.entries.append(entry)

    def _say(self, kind: str, attempt: int, host: int, **more: Any) -> None:
        self._write({"kind": kind, "attempt": attempt, **more}, host)

    def _evaluate(self, attempt: int, host: int) -> None:
        seconds = self._spend("evaluating", 3)
        values = {"step": self.last, "seconds": seconds, "eval/loss": 2.0}
        self._say("evaluated", attempt, host, **values)

    def _live(self, attempt: int, *, is_last: bool) -> None:
        rng, host = self.rng, self.rng.randrange(self.hosts)
        phases = {name: self._spend("starting", 4) for name in ("model", "data")}
        first = rng.randint(0, self.last)
        self._write(started(attempt, first, seconds=phases), host)
        for step in self.entries:
            if step["kind"] == "step" and step["step"] > first and not step.get("was_undone"):
                step["was_undone"] = True
                self.uses["steps"] -= step["seconds"]
                self.uses["done_again"] += step["seconds"]
        if first < self.last:
            self._say("rolled_back", attempt, host, first=first + 1, last=self.last)
        self.last = first
        if first == 0 and rng.random() < 0.7:
            self._evaluate(attempt, host)
        for number in range(rng.randint(0, 5)):
            self._spend("saving" if number else "starting", 0.5)
            seconds = self._spend("steps", 2)
            self.last += 1
            self._write(stepped(attempt, self.last, seconds=seconds), host)
            if rng.random() < 0.3:
                self._evaluate(attempt, host)
        self._leave(attempt, host, is_last=is_last)

    def _leave(self, attempt: int, host: int, *, is_last: bool) -> None:
        end = self.rng.choice(("fault", "resize", "stop", "failed", "silence"))
        uses = {"resize": "halted", "stop": "halted", "failed": "restarting"}
        use = "ending" if is_last else uses.get(end, "recovering")
        driver = self.rng.randrange(self.hosts)
        if end in ("resize", "stop"):
            self._spend(use, 2)
            self._say("halted", attempt, host, step=self.last, reason=end)
        if end == "fault":
            self._spend(use, 9)
            self._say("fault", attempt, driver, text="killed", ranks=[0])
        if end in ("stop", "failed"):
            self._spend(use, 2)
            status = "KILLED" if end == "stop" else "FAILED"
            last = {"last": attempt} if self.has_readings else {}
            self._say("ended", self.launch, driver, status=status, **last)
            self.launch = attempt + 1
            self.now += self.rng.uniform(1, 1e5)
        elif not is_last:
            self._spend(use, 9)


def write_history(life: Life, storage: Storage) -> None:
    """Write a life's entries as its groups and drivers would have."""
    launch, writers = 1, dict[tuple[int, str], HistoryWriter]()
    for entry in life.entries:
        by_driver = entry["kind"] in ("fault", "rolled_back", "ended")
        key = (launch, "d") if by_driver else (entry["attempt"], "")
        if key not in writers:
            writers[key] = HistoryWriter(storage, key[0], print, writer=key[1])
        kept = {k: v for k, v in entry.items() if k not in ("kind", "was_undone")}
        writers[key].add(entry["kind"], kept)
        if entry["kind"] == "ended":
            launch = max(attempt for attempt, _ in writers) + 1
    for writer in writers.values():
        writer.flush()


def check_account(found: Goodput, whole: float) -> None:
    """Raise AssertionError unless no part is negative and all together are the whole."""
    parts = found.to_metrics(prefix="")
    assert all(seconds >= 0 for seconds in parts.values()), parts
    assert all(seconds >= 0 for seconds in found.starting.values()), found.starting
    assert abs(sum(parts.values()) - whole) <= 1e-6 + 0.01 * whole, (parts, whole)
    assert 0 <= found.share <= 1 + 1e-9


def check_status(found: Status) -> None:
    """Raise AssertionError unless all of a run's seconds fit together."""
    check_account(found.goodput, found.seconds_in_all)
    assert 0 <= found.seconds_lost <= found.seconds_in_all + 1e-6
    assert 0 <= found.share_lost <= 1 + 1e-9
    for recovery in found.recoveries:
        assert recovery.seconds >= 0
        assert recovery.steps_rolled_back >= 0
    if found.target and found.target.seconds is not None:
        assert found.target.seconds >= (found.target.seconds_in_steps or 0) - 1e-3
