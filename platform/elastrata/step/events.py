"""Messages between driver and workers: actions, events, and the exceptions that end a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from elastrata.step.records import StepRecord


class Action(IntEnum):
    """An action of the workers after their current step. The largest requested one counts."""

    # Zero, as the actions of all ranks are summed, and only rank 0 sends another one.
    GO_ON = 0
    SAVE = 1
    """Save a durable checkpoint and continue training: a node will leave, and there is no
    replacement."""
    HALT = 2
    """Save a durable checkpoint and wait for the end: another group of workers takes over."""
    STOP = 3
    """Save a durable checkpoint and end the run."""


@dataclass(frozen=True, kw_only=True)
class ControlSignal:
    """One request. Rank 0 receives it, and the reduction of the next step sends it to all ranks."""

    action: Action
    reason: str
    """`resize`, `drain` or `stop`."""
    text: str
    """A one-line description for users."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The driver has started Ray Train."""

    chosen: str = ""
    """Values of the keys that are `auto` by the kind of device, in one line."""

    seconds: Mapping[str, float]
    """Seconds since the launch, by phase."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A group of workers is ready for its first step."""

    attempt: int
    world_size: int
    step: int
    """Number of finished steps in the restored state."""
    state: str
    """Source of the restored state: `new`, `hot` (memory of other processes) or `durable`."""
    pids: Mapping[int, tuple[str, int]]
    """Node id and process id by rank."""
    seconds: Mapping[str, float]
    """Seconds since the worker's function was called, by phase."""
    stayed: int = 0
    """Number of workers that were in the previous group and kept their processes."""
    spare_bytes: int = 0
    """Memory of the idle processes on all nodes that wait for the next group."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The held-out data was evaluated after `step` steps."""

    step: int
    loss: float
    metrics: Mapping[str, float]
    seconds: float

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics to track, by name."""
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
    """Loss after this step; None if this step was not evaluated."""

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics to record with the checkpoint."""
        return {} if self.evaluation_loss is None else {"eval/loss": self.evaluation_loss}


@dataclass(frozen=True, kw_only=True)
class Removed:
    """An old checkpoint was deleted, because the recipe keeps no more of them."""

    uri: str


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """Training had to wait while the checkpoint of `step` was taken."""

    step: int
    seconds: float

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics to track, by name."""
        return {"perf/seconds_of_checkpoint_stall": self.seconds}


@dataclass(frozen=True, kw_only=True)
class Heard:
    """Rank 0 has received a request. All ranks receive it in the next step."""

    action: Action


@dataclass(frozen=True, kw_only=True)
class Halted:
    """The workers have saved the state after `step` and take no more steps, as requested."""

    step: int
    reason: str
    """`resize`, `drain` or `stop`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A group of workers ended without a request."""

    text: str
    ranks: tuple[int, ...]
    """Ranks that failed; empty if the whole group did not start or did not answer."""


@dataclass(frozen=True, kw_only=True)
class Substituted:
    """The cluster lacks something that the recipe requires, and a substitute is used.

    Every group of workers reports it; the user sees it once.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Values, from `step` on, of the keys that are `auto` in the recipe."""

    step: int
    micro_batch_tokens: int
    """The largest value among the kinds of workers."""
    activation_checkpointing: str
    gradient_sync: str = "step"
    micro_batch_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Values by kind of worker, if they differ."""
    text: str
    """Reason of the choice, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Paced:
    """The speeds of the ranks have changed: steps that are not read yet are dealt by the new
    ones."""

    step: int
    """The last finished step."""
    speeds: tuple[int, ...]
    """Relative speed of each data rank; the fastest one has 256."""
    paces: tuple[float, ...]
    """Work per second by rank; 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class Slowed:
    """A rank is slower than others of its kind by more than noise, or has recovered."""

    step: int
    """The last finished step."""
    rank: int
    node: str
    """Id of the node."""
    host: str
    device: str
    factor: float
    """Pace of the rank over the median pace of the other ranks with the same kind of device."""
    since: int
    """The first step with this pace."""
    is_over: bool = False

    @property
    def text(self) -> str:
        """Description in one line."""
        who = f"rank {self.rank} ({self.host}, {self.device})"
        if self.is_over:
            return f"{who} trains at the speed of its kind again since step {self.since}"
        return f"{who} trains at {self.factor:.2f} of the speed of its kind since step {self.since}"


@dataclass(frozen=True, kw_only=True)
class RanOut:
    """A choice of `auto` exceeded a device's memory. Groups of this kind then choose less."""

    group: str
    """Kind of the group: its layout and the phase."""
    choice: Mapping[str, Any]
    """Values by recipe key."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A one-line warning for the user. The run continues."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The input is invalid and the run ends."""

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
    """Training ended before its last step, for the reason in its message. A retry cannot help."""


class ControllerLostError(TrainingError):
    """The workers' controller has ended, and the workers with it. Another controller may
    continue."""


class RanOutError(Exception):
    """A step exceeded a device's memory, and the next group of workers has a choice that needs
    less.

    `told` describes the choice that failed.
    """

    def __init__(self, told: RanOut) -> None:
        # As an argument, so that the exception can be pickled between processes.
        super().__init__(told)
        self.told = told

    def __str__(self) -> str:
        return self.told.text


class Stopped(Exception):  # noqa: N818  a requested end, not an error
    """The workers have saved their state and stopped, as requested."""
