"""The choice that `auto` stands for: all that may be chosen, the best of it by the plan, and its
correction by what steps measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from elastrata.core.model_spec import ModelSpec
from elastrata.core.parallelize import GradientSync
from elastrata.core.recomputation import Recomputation
from elastrata.planner.block import Machine
from elastrata.planner.cluster import Cluster
from elastrata.planner.layout import MOST_SAMPLES, Layout
from elastrata.planner.memory import memory
from elastrata.planner.step_time import step_time

_EQUALLY_FAST = 1.01
"""Choices so much slower than the fastest count as fast, and the largest is taken: the plan knows
nothing of what starting each of them costs."""
MEASURED_STEPS = 4
"""Steps of a phase, after which the choice stays."""
USABLE = 0.9
"""Share of a worker's memory; the rest is for what no step has shown yet."""
_MARGIN = 1.1
"""On how much more a larger choice needs than one that was measured."""
_TELLING = 1.05
"""Times the need of a step: another one that needs so much by the plan shows how the plan errs."""
_FIRST_SHARE = 0.5
"""Share of the room left after the first step that the second may take: by how much the
plan errs about growth is not known before."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Values of the recipe's keys of these names."""

    micro_batch_tokens: int
    activation_checkpointing: Recomputation
    gradient_sync: GradientSync = "step"
    """Of the section `parallel`."""


def budgets(longest: int, batch_size: int) -> tuple[int, ...]:
    """The numbers of tokens that `micro_batch_tokens: auto` may stand for, ascending: one, two,
    four... of the longest samples, as many as a step has.

    Args:
        longest: tokens of the longest sample.
        batch_size: samples of a step.
    """
    samples = [1]
    while samples[-1] < min(MOST_SAMPLES, batch_size):
        samples.append(2 * samples[-1])
    return tuple(longest * number for number in samples)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """All choices for one phase of a recipe, on one group of workers."""

    model: ModelSpec
    cluster: Cluster
    machine: Machine
    layout: Layout
    """The group's; its micro-batches and its checkpointing do not count."""
    batch_size: int
    budgets: tuple[int, ...]
    """Ascending."""
    policies: tuple[Recomputation, ...]
    """Policies that compute more again come later."""
    syncs: tuple[GradientSync, ...] = ("step",)
    below: float = math.inf
    """Bytes; those that need as many by the plan, or more, have run out of memory."""

    @cached_property
    def all(self) -> tuple[Choice, ...]:
        """Each of them. A budget is of no use where half of it takes all that a rank has."""
        most = 2 * self._each * self.model.seq_len
        useful = (
            Choice(micro_batch_tokens=budget, activation_checkpointing=policy, gradient_sync=sync)
            for budget, policy, sync in product(self.budgets, self.policies, self.syncs)
            if budget < most or budget == self.budgets[0]
        )
        return tuple(choice for choice in useful if self.bytes(choice) < self.below)

    def smaller_than(self, choice: Choice) -> Choices:
        """Those that need less memory than one, by the plan."""
        return replace(self, below=min(self.below, self.bytes(choice)))

    @property
    def _each(self) -> int:
        """Samples of a rank in a step, at most."""
        return -(-self.batch_size // self.layout.data)

    @property
    def smallest(self) -> Choice:
        """The choice that needs least memory; of equals, the one that computes most again."""
        return min(self.all, key=lambda choice: (self.bytes(choice), -self._place(choice)))

    def _place(self, choice: Choice) -> int:
        return self.policies.index(choice.activation_checkpointing)

    def bytes(self, choice: Choice, tokens: int | None = None) -> float:
        """Memory of the worker that needs most.

        Args:
            choice: one of these.
            tokens: of the largest micro-batch there is; default: as many as there may be.
        """
        size = choice.micro_batch_tokens if tokens is None else max(1, tokens)
        count = -(-self._each * self.model.seq_len // choice.micro_batch_tokens)
        needed = memory(
            replace(self.model, seq_len=size),
            self.cluster.device,
            self.machine.stack,
            replace(self._layout(choice), micro_batch=1),
            max(count, self.layout.pipeline) * self.layout.data,
        )
        return needed.total

    def _layout(self, choice: Choice) -> Layout:
        return replace(
            self.layout,
            checkpointing=choice.activation_checkpointing,
            gradient_sync=choice.gradient_sync,
        )

    def seconds(self, choice: Choice) -> float:
        """Seconds of a step of full-length samples; a last micro-batch takes what it is full."""
        samples = max(1, choice.micro_batch_tokens // self.model.seq_len)
        layout = replace(self._layout(choice), micro_batch=samples)
        full = layout.micro_batches(self.batch_size) * samples * layout.data
        time = step_time(self.model, self.cluster, self.machine, layout, self.batch_size)
        return time.total * self.batch_size / full

    def best(self, fits: Callable[[Choice], bool]) -> Choice:
        """The fastest that fits, or the smallest where none does."""
        fitting = [choice for choice in self.all if fits(choice)]
        if not fitting:
            return self.smallest
        seconds = {choice: self.seconds(choice) for choice in fitting}
        least = min(seconds.values())
        fast = [choice for choice in fitting if seconds[choice] <= _EQUALLY_FAST * least]
        return max(fast, key=lambda choice: (choice.micro_batch_tokens, -seconds[choice]))


class Correction:
    """Measurements of a group of workers, from which the choice for the next step follows.

    The first step is taken with what needs least memory. From there on what is measured counts, and
    the plan tells differences only: how much more than a measured step another choice needs. Where
    steps have shown that it tells too little, its differences are taken for as much larger.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._has_grown = False
        self._needed: float | None = None
        """Bytes that the plan has for the step that the room was measured in."""
        self._room = 0.0
        """Bytes that were left then, of those that may be used."""
        self._factor = 1.0

    def begin_phase(self) -> None:
        """The choices are others from now on; what was measured stays."""
        self._steps = 0

    @property
    def is_over(self) -> bool:
        """Whether enough steps were measured."""
        return self._steps >= MEASURED_STEPS

    def measured(self, choices: Choices, choice: Choice, tokens: int, room: float) -> None:
        """A step was taken.

        Args:
            choices: it was one of.
            choice: that it was taken with.
            tokens: of its largest micro-batch, on any rank.
            room: bytes that were left at the peak since the group began, on the rank that had
                least, of those that may be used; negative where there were more in use.
        """
        self._steps += 1
        needed = choices.bytes(choice, tokens)
        if self._needed is None:
            self._needed, self._room = needed, room
        elif needed >= _TELLING * self._needed:
            self._has_grown = True
            self._factor = max(1.0, (self._room - room) / (needed - self._needed))
            self._needed, self._room = needed, room
        elif needed > self._needed or room < self._room:
            self._needed, self._room = needed, room

    def more(self, choices: Choices, choice: Choice) -> float:
        """Bytes that a choice needs beyond what was measured; negative where it needs less."""
        assert self._needed is not None
        growth = choices.bytes(choice) - self._needed
        factor = _MARGIN * self._factor
        return growth * factor if growth > 0 else growth / factor

    @property
    def has_measured(self) -> bool:
        """Whether any step was measured."""
        return self._needed is not None

    def fits(self, choices: Choices, choice: Choice) -> bool:
        """Whether the next step is to have room for a choice, once one was measured."""
        is_first = self._steps == 1 and not self._has_grown and self._room > 0
        room = self._room * (_FIRST_SHARE if is_first else 1.0)
        return self.more(choices, choice) <= room

    def next(self, choices: Choices) -> Choice:
        """The choice for the next step."""
        if not self.has_measured:
            return choices.smallest
        return choices.best(lambda choice: self.fits(choices, choice))
