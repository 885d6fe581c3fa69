"""The status of a run, from its storage alone: any process on any cluster can ask."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastrata.core.target import TargetConfig
from elastrata.run import history
from elastrata.run.attempts import Recovery, attempts, recoveries, seconds_lost
from elastrata.run.entries import metrics_of
from elastrata.run.evidence import evidence
from elastrata.run.folder import RUN_FILE, read_identity, recipe_problems
from elastrata.run.goodput import Goodput, goodput
from elastrata.run.slow_ranks import SlowRank, TimeBalance, slow_ranks, time_balance
from elastrata.run.state import (
    Driver,
    State,
    driver_problems,
    last_sign,
    look_at_driver,
    run_state,
)
from elastrata.run.summary import read_summary
from elastrata.run.time_to_target import TimeToTarget, time_to_target
from elastrata.run.timeline import Timeline
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]


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
