"""The status of a run: how far it has come, whether it lives, and what it has lost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from elastrata.run import history
from elastrata.run.consistency import evidence
from elastrata.run.entries import metrics_of
from elastrata.run.folder import RUN_FILE, read_identity, read_summary, recipe_problems
from elastrata.run.goodput import Goodput, TimeToTarget, goodput, time_to_target
from elastrata.run.ownership import Driver, driver_problems, look_at_driver
from elastrata.run.timeline import Recovery, Timeline, attempts, end_index, recoveries, seconds_lost
from elastrata.step.target import TargetConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]
State = Literal["running", "finished", "stopped", "failed", "silent"]
SILENT_SECONDS = 120.0
"""A run that wrote nothing for this long, or for ten of its steps, gives no sign of life."""
_ENDS: dict[str, State] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}


def run_state(
    entries: Sequence[Entry], *, done: bool, driver: Driver, now: float
) -> tuple[State, str]:
    """The state of a run, and the same in words.

    Steps and entries decide it, in the order they were written. A clock does only where no process
    and no entry tells: for a driver on another host, and in histories of old.

    Args:
        entries: its history.
        done: whether it has come to its last step, or to its target.
        driver: what is known about its driver.
        now: Unix time.
    """
    if ended := _end(entries, driver):
        state = _ENDS.get(ended["status"], "failed")
        reason = ended.get("text") or _halt(entries)
        return state, f"{state}: {reason}" if reason and state != "finished" else state
    seen = last_sign(entries, driver)
    steps = [entry["seconds"] for entry in entries if entry["kind"] == "step"][-1:]
    limit = max([SILENT_SECONDS, *(10 * seconds for seconds in steps)])
    lately = seen is not None and abs(now - seen) <= limit
    if driver.alive or (driver.alive is None and lately and not done):
        return "running", "running"
    if done:
        return "finished", "finished"
    since = f"since {utc(seen)}" if seen else "yet"
    return "silent", f"no sign of life {since}{_unrecorded(entries, driver)}"


def last_sign(entries: Sequence[Entry], driver: Driver) -> float | None:
    """Unix time of the last sign of life, of workers or driver; None: there was none yet."""
    newest = max((entry["attempt"] for entry in entries), default=0)
    last = [entry["time"] for entry in entries if entry["attempt"] == newest][-1:]
    ended = [entry["time"] for entry in entries if entry["kind"] == "ended"][-1:]
    return max([driver.seen, *last, *(ended if _end(entries, driver) else [])]) or None


def utc(seconds: float) -> str:
    """A Unix time for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _unrecorded(entries: Sequence[Entry], driver: Driver) -> str:
    """The steps that a dead driver had heard of and that are not in the history, in words."""
    steps = (entry["step"] for entry in entries if entry["kind"] == "step")
    if driver.newest and driver.newest.step > (last := max(steps, default=0)):
        return f"; at least up to step {driver.newest.step:,}, on record up to step {last:,}"
    return ""


def _end(entries: Sequence[Entry], driver: Driver) -> Entry | None:
    """The entry that says how the newest launch ended; None where that one has not ended."""
    ended = next((entry for entry in reversed(entries) if entry["kind"] == "ended"), None)
    if ended is None:
        return None
    groups = attempts(entries)
    is_last = end_index(groups, ended) == len(groups) - 1
    if "last" not in ended:  # of an earlier version
        is_last |= driver.released
    if driver.alive:
        is_old = driver.since > ended["time"]
        began_again = ended["driver"] != driver.token if "driver" in ended else is_old
        is_last = is_last and not began_again
    return ended if is_last else None


def _halt(entries: Sequence[Entry]) -> str:
    """Why the newest group of workers stopped as it was asked; empty where it did not."""
    kinds = ("started", "halted")
    last = [entry for entry in entries if entry["kind"] in kinds][-1:]
    return "".join(str(entry.get("text", "")) for entry in last)


_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank of the newest group that is slower than the others of its kind."""

    rank: int
    host: str
    device: str
    factor: float
    """Its pace over theirs."""
    since: int
    """The step since which it has this pace."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}, {self.device}) trains at {self.factor:.2f} of the "
            f"speed of its kind since step {self.since}"
        )


@dataclass(frozen=True, kw_only=True)
class TimeBalance:
    """How equal the own times of ranks are, over the newest steps of a group."""

    imbalance: float
    """Of the slowest rank's seconds over the mean of all, the median."""
    slowest_rank: int
    """The rank that was the slowest one most often."""


def slow_ranks(entries: Sequence[Entry]) -> tuple[SlowRank, ...]:
    """Those of the newest group of workers, by rank."""
    newest = max((entry["attempt"] for entry in entries if entry["kind"] == "started"), default=0)
    slow: dict[int, SlowRank] = {}
    for entry in entries:
        if entry["kind"] == "slowed" and entry["attempt"] == newest:
            keys = ("rank", "host", "device", "factor", "since")
            slow[entry["rank"]] = SlowRank(**{key: entry[key] for key in keys})
            if entry["is_over"]:
                del slow[entry["rank"]]
    return tuple(slow[rank] for rank in sorted(slow))


def time_balance(steps: Sequence[Entry]) -> TimeBalance | None:
    """Over the newest steps; None where ranks were not measured.

    Args:
        steps: the entries of the steps that count, in order.
    """
    newest = [step for step in steps[-_STEPS:] if step.get("time_imbalance")]
    newest = [step for step in newest if step["world_size"] == newest[-1]["world_size"]]
    if not newest:
        return None
    return TimeBalance(
        imbalance=statistics.median(step["time_imbalance"] for step in newest),
        slowest_rank=statistics.mode(step["slowest_rank"] for step in newest),
    )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A group of workers was lost."""

    time: float
    attempt: int
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WorldSize:
    """From `step` on the run had that many workers."""

    attempt: int
    time: float
    step: int
    """Steps done by then."""
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation that counts."""

    step: int
    metrics: Mapping[str, float]
    """By name: `eval/loss`, `eval/loss/SOURCE`, `eval/SET/loss`, and those of the workload."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A durable checkpoint."""

    step: int
    uri: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a run stands. The field names are the keys of `elastrata status --json`."""

    run: str
    state: State
    """`silent`: it has not ended, but gives no sign of life."""
    text: str
    """The state in words, with the reason or the time."""
    seen: float | None
    """Unix time of its last sign of life; None: there was none yet."""
    steps: int
    """Optimizer steps done."""
    steps_in_all: int
    progress: float
    """The first over the second."""
    target: TimeToTarget | None
    """Whether the recipe's target is reached, and when; None where it has none."""
    samples_seen: int
    tokens_seen: int
    loss: float | None
    """Training loss of the last step; None: no step yet, or not finite."""
    evaluation: Evaluation | None
    """The newest one."""
    checkpoint: Checkpoint | None
    """The newest one."""
    world_sizes: tuple[WorldSize, ...]
    spare_bytes: int
    """Memory of the idle processes that wait for the newest group to lose a worker."""
    faults: tuple[Fault, ...]
    recoveries: tuple[Recovery, ...]
    slow_ranks: tuple[SlowRank, ...]
    """Of the newest group, those that are slower than the others of their kind."""
    time_balance: TimeBalance | None
    """Of the newest steps; None where ranks were not measured, or there is one."""
    seconds_in_all: float
    """From the first start to the last sign of life, less the time when the run had ended."""
    seconds_lost: float
    """Without a step between two groups of workers, or on steps that were rolled back."""
    share_lost: float
    goodput: Goodput
    """What all those seconds went into."""
    problems: tuple[str, ...]
    """Damage in the run's folder, a line each."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def status(run: Storage) -> Status:
    """Looks at a run's folder.

    Raises:
        UserError: there is no such run, or something of it was altered so that it cannot be read.
    """
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    checkpoints, recipe, found = run.sub("checkpoints"), read_summary(run), evidence(run)
    newest = [
        Checkpoint(step=commit.step, uri=checkpoints.uri(commit.folder))
        for commit in found.counting[:1]
    ]
    return summary(
        run.uri(),
        found.history.entries,
        steps_in_all=recipe.steps,
        target=recipe.target,
        checkpoint=newest[0] if newest else None,
        driver=look_at_driver(run),
        now=time.time(),
        problems=(*found.problems, *recipe_problems(run, identity), *driver_problems(run)),
    )


def summary(
    run: str,
    entries: Sequence[Entry],
    *,
    steps_in_all: int,
    target: TargetConfig | None,
    checkpoint: Checkpoint | None,
    driver: Driver,
    now: float,
    problems: Sequence[str] = (),
) -> Status:
    """The status that a history gives.

    Args:
        run: the run's folder or URL.
        entries: its history.
        steps_in_all: by its recipe.
        target: of its recipe.
        checkpoint: the newest one.
        driver: what is known about its driver.
        now: Unix time.
        problems: what is not as it was written.
    """
    steps = history.effective_steps(entries)
    last: Entry = steps[-1] if steps else {"step": 0, "samples": 0, "tokens": 0, "loss": math.nan}
    outcome = time_to_target(entries, target) if target else None
    done = last["step"] >= steps_in_all or (outcome is not None and outcome.step == last["step"])
    state, text = run_state(entries, done=done, driver=driver, now=now)
    if state == "running" and driver.newest and driver.newest.step > last["step"]:
        last = driver.newest.model_dump()
    recovered = recoveries(entries)
    seconds = seconds_in_all(entries)
    lost = seconds_lost(entries, recovered)
    return Status(
        run=run,
        state=state,
        text=text,
        seen=last_sign(entries, driver),
        steps=last["step"],
        steps_in_all=steps_in_all,
        progress=last["step"] / steps_in_all,
        target=outcome,
        samples_seen=last["samples"],
        tokens_seen=last["tokens"],
        loss=_finite(last["loss"]),
        evaluation=_evaluation(entries),
        checkpoint=checkpoint,
        world_sizes=_world_sizes(entries),
        spare_bytes=_spare_bytes(entries),
        faults=_faults(entries),
        recoveries=tuple(recovered),
        slow_ranks=slow_ranks(entries),
        time_balance=time_balance(steps),
        seconds_in_all=seconds,
        seconds_lost=lost,
        share_lost=lost / seconds if seconds else 0.0,
        goodput=goodput(entries),
        problems=tuple(problems),
    )


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def seconds_in_all(entries: Sequence[Entry]) -> float:
    """From the first start of workers to the last entry, less the time when the run had ended."""
    groups = attempts(entries)
    known = {group.attempt for group in groups}
    orphans = (e for e in entries if e["kind"] == "step" and e["attempt"] not in known)
    return Timeline(entries, groups).seconds + sum(float(step["seconds"]) for step in orphans)


def _evaluation(entries: Sequence[Entry]) -> Evaluation | None:
    """The newest one that no later attempt rolled back."""
    for entry in history.surviving_evaluations(entries)[-1:]:
        return Evaluation(step=entry["step"], metrics=metrics_of(entry))
    return None


def _world_sizes(entries: Sequence[Entry]) -> tuple[WorldSize, ...]:
    return tuple(
        WorldSize(
            attempt=group.attempt,
            time=group.started,
            step=group.step,
            world_size=group.world_size,
        )
        for group in attempts(entries)
    )


def _spare_bytes(entries: Sequence[Entry]) -> int:
    started = [entry for entry in entries if entry["kind"] == "started"]
    return int(started[-1].get("spare_bytes", 0)) if started else 0


def _faults(entries: Sequence[Entry]) -> tuple[Fault, ...]:
    faults = [
        Fault(
            time=entry["time"],
            attempt=entry["attempt"],
            text=str(entry.get("text", "")),
            ranks=tuple(entry.get("ranks", ())),
        )
        for entry in entries
        if entry["kind"] == "fault"
    ]
    return tuple(sorted(faults, key=lambda fault: fault.attempt))
