"""One attempt of a run: the loop of step, evaluation and save, until the run ends or halts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from elastrata.step.events import Action
from elastrata.step.records import StepRecord
from elastrata.step.step_message import Effort
from elastrata.step.target import TargetConfig, reached
from elastrata.trainer.checkpoint_manager import CheckpointManager
from elastrata.trainer.evaluation import HeldOut
from elastrata.trainer.loop import unmeasured
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A finished step, after its evaluation and its save if they were due."""

    record: StepRecord
    metrics: Mapping[str, float]
    """The evaluation's results by name; empty if no evaluation was due."""
    evaluation_seconds: float
    action: Action
    """The action that all ranks have agreed on."""
    is_last: bool
    """True if the run ends with this step: its last one, or the one that reached its target."""


def attempt(
    trainer: Trainer,
    manager: CheckpointManager,
    held_out: HeldOut,
    stream: Iterable[RankStep],
    start: Start,
    *,
    steps: int,
    target: TargetConfig | None,
    measured: Callable[[RankStep, Sequence[Effort]], None] = unmeasured,
) -> Iterator[TrainedStep]:
    """Train until the run ends or the caller closes the generator. Collective."""
    # A run that began with given weights is evaluated before its first step, as step 0.
    if at_once := held_out.due_at_once():
        manager.evaluated(0, *trainer.evaluate(at_once))
    steps_done = trainer.steps(
        stream,
        start,
        chose=manager.chose,
        asked=manager.asked,
        before_change=manager.before_change,
        measured=measured,
    )
    # Ends the background work of the steps when the caller closes this generator.
    with closing(steps_done):
        for record, action in steps_done:
            manager.stepped(record)
            metrics, seconds, is_last = {}, 0.0, record.step == steps
            if due := held_out.due(record):
                losses, seconds = trainer.evaluate(due)
                metrics = dict(manager.evaluated(record.step, losses, seconds))
                # Evaluated before the save, so that the commit carries the evaluation of its step.
                is_last |= _has_reached(target, metrics, record, manager)
            # Before the yield: the caller may stop at any step that it has received.
            manager.keep(record, action, is_last=is_last)
            yield TrainedStep(
                record=record,
                metrics=metrics,
                evaluation_seconds=seconds,
                action=action,
                is_last=is_last,
            )
            if is_last:
                return


def _has_reached(
    target: TargetConfig | None,
    metrics: Mapping[str, float],
    record: StepRecord,
    manager: CheckpointManager,
) -> bool:
    """Return whether the evaluation has reached the run's target; equal on every rank.
    Collective."""
    # Rank 0 decides, so that all ranks stop at the same step.
    if target is None or not agreed(reached(target, metrics)):
        return False
    manager.reached(record, target.metric, metrics[target.metric])
    return True


def agreed(value: Any) -> Any:
    """Return rank 0's value on every rank. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
