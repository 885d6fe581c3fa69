"""The status of a run: its progress, whether it is alive, and the time it has lost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from elastrata.run import history
from elastrata.run.consistency import read_evidence
from elastrata.run.entries import metrics_of
from elastrata.run.folder import RUN_FILE, read_identity, read_summary, recipe_problems
from elastrata.run.goodput import Goodput, TimeToTarget, goodput, time_to_target
from elastrata.run.ownership import Driver, driver_problems, read_driver
from elastrata.run.timeline import Recovery, Timeline, attempts, end_index, recoveries, seconds_lost
from elastrata.step.target import TargetConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]
State = Literal["running", "finished", "stopped", "failed", "silent"]
SILENT_SECONDS = 120.0
"""A run counts as silent if it writes nothing for this long and for ten of its steps."""
_ENDS: dict[str, State] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}


def run_state(
    entries: Sequence[Entry], *, done: bool, driver: Driver, now: float
) -> tuple[State, str]:
    """Return the state of a run, and a text that describes it.

    Args:
        entries: the run's history.
        done: whether it has reached its last step or its target.
        driver: the known facts about its driver.
        now: Unix time.
    """
    # Entries decide, in the order in which they were written. The clock decides only if neither the
    # driver's process nor an entry does: for a driver on another host, and in old histories.
    if ended := _find_end(entries, driver):
        state = _ENDS.get(ended["status"], "failed")
        reason = ended.get("text") or _halt_reason(entries)
        return state, f"{state}: {reason}" if reason and state != "finished" else state
    last_seen = last_sign_of_life(entries, driver)
    steps = [entry["seconds"] for entry in entries if entry["kind"] == "step"][-1:]
    # Long steps write rarely, so a slow run may be quiet for longer.
    limit = max([SILENT_SECONDS, *(10 * seconds for seconds in steps)])
    # By absolute value: the clock of another host may be ahead.
    is_recent = last_seen is not None and abs(now - last_seen) <= limit
    if driver.alive or (driver.alive is None and is_recent and not done):
        return "running", "running"
    if done:
        return "finished", "finished"
    since = f"since {utc(last_seen)}" if last_seen else "yet"
    return "silent", f"no sign of life {since}{_describe_unrecorded(entries, driver)}"


def last_sign_of_life(entries: Sequence[Entry], driver: Driver) -> float | None:
    """Return the Unix time of the last sign of life of workers or driver, or None."""
    newest = max((entry["attempt"] for entry in entries), default=0)
    last = [entry["time"] for entry in entries if entry["attempt"] == newest][-1:]
    ended = [entry["time"] for entry in entries if entry["kind"] == "ended"][-1:]
    return max([driver.seen, *last, *(ended if _find_end(entries, driver) else [])]) or None


def utc(seconds: float) -> str:
    """Format a Unix time for display."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _describe_unrecorded(entries: Sequence[Entry], driver: Driver) -> str:
    """Return a note on steps that a dead driver had heard of and the history lacks."""
    steps = (entry["step"] for entry in entries if entry["kind"] == "step")
    if driver.newest and driver.newest.step > (last := max(steps, default=0)):
        return f"; at least up to step {driver.newest.step:,}, on record up to step {last:,}"
    return ""


def _find_end(entries: Sequence[Entry], driver: Driver) -> Entry | None:
    """Return the entry about the end of the newest launch; None if that launch has not ended."""
    ended = next((entry for entry in reversed(entries) if entry["kind"] == "ended"), None)
    if ended is None:
        return None
    groups = attempts(entries)
    # A launch that began after this entry makes it the end of an earlier launch.
    is_last = end_index(groups, ended) == len(groups) - 1
    if "last" not in ended:  # of an earlier version
        is_last |= driver.released
    if driver.alive:
        is_old = driver.since > ended["time"]
        # Tokens identify launches; earlier versions recorded none, so their times decide.
        began_again = ended["driver"] != driver.token if "driver" in ended else is_old
        is_last = is_last and not began_again
    return ended if is_last else None


def _halt_reason(entries: Sequence[Entry]) -> str:
    """Return why the newest group of workers halted on request; empty if it did not."""
    kinds = ("started", "halted")
    last = [entry for entry in entries if entry["kind"] in kinds][-1:]
    return "".join(str(entry.get("text", "")) for entry in last)


_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank of the newest group that is slower than the others with the same device type."""

    rank: int
    host: str
    device: str
    factor: float
    """Its speed relative to theirs."""
    since: int
    """The step since which it has this speed."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}, {self.device}) trains at {self.factor:.2f} of the "
            f"speed of its kind since step {self.since}"
        )


@dataclass(frozen=True, kw_only=True)
class TimeBalance:
    """How evenly the compute time is spread over ranks, in the newest steps of a group."""

    imbalance: float
    """Median over steps of the slowest rank's seconds divided by the mean over ranks."""
    slowest_rank: int
    """The rank that was the slowest most often."""


def slow_ranks(entries: Sequence[Entry]) -> tuple[SlowRank, ...]:
    """Return the slow ranks of the newest group of workers, by rank."""
    newest = max((entry["attempt"] for entry in entries if entry["kind"] == "started"), default=0)
    # The newest entry of a rank replaces earlier ones, or ends them.
    slow: dict[int, SlowRank] = {}
    for entry in entries:
        if entry["kind"] == "slowed" and entry["attempt"] == newest:
            keys = ("rank", "host", "device", "factor", "since")
            slow[entry["rank"]] = SlowRank(**{key: entry[key] for key in keys})
            if entry["is_over"]:
                del slow[entry["rank"]]
    return tuple(slow[rank] for rank in sorted(slow))


def time_balance(steps: Sequence[Entry]) -> TimeBalance | None:
    """Return the time balance of the newest steps; None if ranks were not measured.

    Args:
        steps: the entries of the effective steps, in order.
    """
    newest = [step for step in steps[-_STEPS:] if step.get("time_imbalance")]
    # Imbalances of different world sizes are not comparable.
    newest = [step for step in newest if step["world_size"] == newest[-1]["world_size"]]
    if not newest:
        return None
    return TimeBalance(
        imbalance=statistics.median(step["time_imbalance"] for step in newest),
        slowest_rank=statistics.mode(step["slowest_rank"] for step in newest),
    )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The loss of a group of workers."""

    time: float
    attempt: int
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WorldSize:
    """A number of workers, and when the run began to use it."""

    attempt: int
    time: float
    step: int
    """Steps done before."""
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation that was not rolled back."""

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
    """The status of a run. The field names are the keys of `elastrata status --json`."""

    run: str
    state: State
    """`silent`: it has not ended, but shows no sign of life."""
    text: str
    """The state as text, with its reason or time."""
    seen: float | None
    """Unix time of its last sign of life; None before the first one."""
    steps: int
    """Optimizer steps done."""
    steps_in_all: int
    progress: float
    """`steps` divided by `steps_in_all`."""
    target: TimeToTarget | None
    """Whether and when the run reached its target; None if its recipe has none."""
    samples_seen: int
    tokens_seen: int
    loss: float | None
    """Training loss of the last step; None before the first step or if not finite."""
    evaluation: Evaluation | None
    """The newest evaluation."""
    checkpoint: Checkpoint | None
    """The newest checkpoint."""
    world_sizes: tuple[WorldSize, ...]
    spare_bytes: int
    """Memory of the idle spare processes that would replace a lost worker of the newest group."""
    faults: tuple[Fault, ...]
    recoveries: tuple[Recovery, ...]
    slow_ranks: tuple[SlowRank, ...]
    """Ranks of the newest group that are slower than the others of their kind."""
    time_balance: TimeBalance | None
    """Of the newest steps; None if ranks were not measured or the run has a single rank."""
    seconds_in_all: float
    """From the first start to the last sign of life, without the time in which the run had
    ended."""
    seconds_lost: float
    """Seconds between two groups of workers, and in steps that were rolled back."""
    share_lost: float
    goodput: Goodput
    """The breakdown of all these seconds."""
    problems: tuple[str, ...]
    """Damage in the run's folder, one line each."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def status(run: Storage) -> Status:
    """Read the status of a run from its folder.

    Raises:
        UserError: there is no run, or a file of it is damaged and cannot be read.
    """
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    checkpoints, recipe, run_evidence = (
        run.sub("checkpoints"),
        read_summary(run),
        read_evidence(run),
    )
    newest = [
        Checkpoint(step=commit.step, uri=checkpoints.uri(commit.folder))
        for commit in run_evidence.current_commits[:1]
    ]
    return summary(
        run.uri(),
        run_evidence.history.entries,
        steps_in_all=recipe.steps,
        target=recipe.target,
        checkpoint=newest[0] if newest else None,
        driver=read_driver(run),
        now=time.time(),
        problems=(*run_evidence.problems, *recipe_problems(run, identity), *driver_problems(run)),
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
    """Return the status that follows from a history.

    Args:
        run: the run's folder or URL.
        entries: its history.
        steps_in_all: number of steps in its recipe.
        target: target in its recipe.
        checkpoint: its newest checkpoint.
        driver: the known facts about its driver.
        now: Unix time.
        problems: damage found in its folder.
    """
    steps = history.effective_steps(entries)
    last: Entry = steps[-1] if steps else {"step": 0, "samples": 0, "tokens": 0, "loss": math.nan}
    outcome = time_to_target(entries, target) if target else None
    done = last["step"] >= steps_in_all or (outcome is not None and outcome.step == last["step"])
    state, text = run_state(entries, done=done, driver=driver, now=now)
    # The driver hears of steps some seconds before they are in the history.
    if state == "running" and driver.newest and driver.newest.step > last["step"]:
        last = driver.newest.model_dump()
    recovered = recoveries(entries)
    seconds = seconds_in_all(entries)
    lost_seconds = seconds_lost(entries, recovered)
    return Status(
        run=run,
        state=state,
        text=text,
        seen=last_sign_of_life(entries, driver),
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
        seconds_lost=lost_seconds,
        share_lost=lost_seconds / seconds if seconds else 0.0,
        goodput=goodput(entries),
        problems=tuple(problems),
    )


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def seconds_in_all(entries: Sequence[Entry]) -> float:
    """Return the seconds from the first start of workers to the last entry.

    The time in which the run had ended is not included.
    """
    groups = attempts(entries)
    # Steps of a group whose start is missing are not on the timeline: add their own seconds.
    started_attempts = {group.attempt for group in groups}
    orphans = (e for e in entries if e["kind"] == "step" and e["attempt"] not in started_attempts)
    return Timeline(entries, groups).seconds + sum(float(step["seconds"]) for step in orphans)


def _evaluation(entries: Sequence[Entry]) -> Evaluation | None:
    """Return the newest evaluation that no later attempt rolled back."""
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
    """Return the losses of groups of workers, by attempt."""
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
