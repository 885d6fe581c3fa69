"""A control signal: what the driver, or Ray Train's controller, asks of the workers in training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Action(IntEnum):
    """An instruction to the workers for when their step is done. Of two the larger one counts."""

    GO_ON = 0
    SAVE = 1
    """Take a durable checkpoint and go on: a node is about to go, and there is no other."""
    HALT = 2
    """Take a durable checkpoint and wait for the end: another group of workers takes over."""
    STOP = 3
    """Take a durable checkpoint and end the run."""


@dataclass(frozen=True, kw_only=True)
class ControlSignal:
    """One request. Rank 0 hears of it, and the step's own reduction tells all ranks at once."""

    action: Action
    reason: str
    """`resize`, `drain` or `stop`."""
    text: str
    """For people, in one line."""
