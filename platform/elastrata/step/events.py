"""What driver and workers tell each other: commands to workers, events of workers, and the
exceptions that end a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from elastrata.step.records import StepRecord


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


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The driver hands the run over to Ray Train."""

    seconds: Mapping[str, float]
    """Seconds since the launch, by phase."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A group of workers is ready to take its first step."""

    attempt: int
    world_size: int
    step: int
    """Steps done in the state it continues from."""
    state: str
    """Where that state comes from: `new`, `hot` (the memory of other processes) or `durable`."""
    pids: Mapping[int, tuple[str, int]]
    """Node id and process id of every rank."""
    seconds: Mapping[str, float]
    """Seconds since the worker's function was called, by phase."""
    stayed: int = 0
    """Workers that were in a group before this one, and kept their processes."""
    spare_bytes: int = 0
    """Memory of the idle processes that wait on all nodes for the next group."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The held-out data was evaluated after `step` steps."""

    step: int
    loss: float
    metrics: Mapping[str, float]
    seconds: float

    def to_metrics(self) -> dict[str, float]:
        """The values to track, by metric name."""
        return {
            "eval/loss": self.loss,
            **{f"eval/{name}": value for name, value in self.metrics.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A checkpoint is complete."""

    step: int
    uri: str
    evaluation_loss: float | None
    """The loss after this very step, where it was evaluated."""

    def to_metrics(self) -> dict[str, float]:
        """The values to record beside the checkpoint."""
        return {} if self.evaluation_loss is None else {"eval/loss": self.evaluation_loss}


@dataclass(frozen=True, kw_only=True)
class Removed:
    """An old checkpoint was deleted, to keep no more than the recipe asks for."""

    uri: str


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """Taking the checkpoint of `step` kept the training waiting."""

    step: int
    seconds: float

    def to_metrics(self) -> dict[str, float]:
        """The values to track, by metric name."""
        return {"perf/seconds_of_checkpoint_stall": self.seconds}


@dataclass(frozen=True, kw_only=True)
class Heard:
    """Rank 0 knows of a request; all ranks hear of it with the step that comes."""

    action: Action


@dataclass(frozen=True, kw_only=True)
class Halted:
    """The workers have saved the state after `step` and take no more steps, as they were asked."""

    step: int
    reason: str
    """`resize`, `drain` or `stop`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A group of workers is gone that was not asked to go."""

    text: str
    ranks: tuple[int, ...]
    """Ranks that failed; empty where the whole group did not start or did not answer."""


@dataclass(frozen=True, kw_only=True)
class Substituted:
    """Something the recipe asks for is not there, and something else is used, in one line. Every
    group of workers says so; the user hears of it once."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Values, from `step` on, of the keys that the recipe leaves open (`auto`)."""

    step: int
    micro_batch_tokens: int
    """Of the kind of worker that has most."""
    activation_checkpointing: str
    gradient_sync: str = "step"
    micro_batch_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Of each kind, where they differ."""
    text: str
    """Why, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Paced:
    """The ranks have other paces than they are dealt to by: steps that are still to be read are to
    be dealt by these."""

    step: int
    """The last one that is done."""
    speeds: tuple[int, ...]
    """Of the data ranks, the fastest one's being 256."""
    paces: tuple[float, ...]
    """By rank, work by second; 0 where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Slowed:
    """A rank is slower than the others of its kind, beyond noise; or is so no more."""

    step: int
    """The last one that is done."""
    rank: int
    node: str
    """Its id."""
    host: str
    device: str
    factor: float
    """Its pace over the median of the others that have the same kind of device."""
    since: int
    """The step since which it has this pace."""
    is_over: bool = False

    @property
    def text(self) -> str:
        """In one line."""
        who = f"rank {self.rank} ({self.host}, {self.device})"
        if self.is_over:
            return f"{who} is as fast as its kind again, since step {self.since}"
        return f"{who} trains at {self.factor:.2f} of the speed of its kind since step {self.since}"


@dataclass(frozen=True, kw_only=True)
class RanOut:
    """A choice of `auto` needed more memory than a device has: such groups take smaller ones."""

    group: str
    """The kind of group: its layout, and the phase."""
    choice: Mapping[str, Any]
    """Values of the recipe's keys of these names."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Warned:
    """Something the user should know, in one line; the run goes on."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The input cannot work: the run ends."""

    problems: tuple[str, ...]


Event = (
    Launched
    | Started
    | StepRecord
    | Evaluated
    | Committed
    | Removed
    | Stalled
    | Heard
    | Halted
    | Lost
    | Substituted
    | Chosen
    | Paced
    | Slowed
    | RanOut
    | Warned
    | Refused
)


class TrainingError(Exception):
    """Training ended before its last step; says how, in one line. Trying again cannot help."""


class ControllerLostError(TrainingError):
    """The workers' controller is gone, and they with it. Another controller may go on."""


class RanOutError(Exception):
    """A step ran out of a device's memory, and the next group of workers has a choice that needs
    less. `told` says which choice it was."""

    def __init__(self, told: RanOut) -> None:
        super().__init__(told)
        self.told = told

    def __str__(self) -> str:
        return self.told.text


class Stopped(Exception):  # noqa: N818  it is the end that was asked for, not an error
    """The workers have saved their state and stopped, as they were asked to."""
