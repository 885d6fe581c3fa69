"""What `auto` stands for: all that may be chosen, what it needs and takes, and the best of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.block import Machine
from elastrata.planner.cluster import Cluster
from elastrata.planner.layout import Checkpointing, Layout
from elastrata.planner.memory import memory
from elastrata.planner.step_time import step_time

MOST_SAMPLES = 64
"""Longest samples in a micro-batch: devices are full long before."""
_EQUALLY_FAST = 1.01
"""Of what is nearly as fast as the fastest, the largest micro-batches are taken: the plan knows
nothing of what starting each of them costs."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Values of the recipe's keys of these names."""

    micro_batch_tokens: int
    activation_checkpointing: Checkpointing


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
    """What may be chosen for one phase of a recipe, on one group of workers."""

    model: ModelSpec
    cluster: Cluster
    machine: Machine
    layout: Layout
    """Of the group; its micro-batches and its checkpointing do not count."""
    batch_size: int
    budgets: tuple[int, ...]
    """Ascending."""
    policies: tuple[Checkpointing, ...]
    """Those that compute more again come later."""

    @cached_property
    def all(self) -> tuple[Choice, ...]:
        """Each of them. A budget is of no use where half of it takes all that a rank has."""
        most = 2 * self._each * self.model.seq_len
        return tuple(
            Choice(micro_batch_tokens=budget, activation_checkpointing=policy)
            for budget, policy in product(self.budgets, self.policies)
            if budget < most or budget == self.budgets[0]
        )

    @property
    def _each(self) -> int:
        """Samples of a rank in a step, at most."""
        return -(-self.batch_size // self.layout.data)

    @property
    def smallest(self) -> Choice:
        """That needs least memory; of equals, that computes most again."""
        return min(self.all, key=lambda one: (self.bytes(one), -self._place(one)))

    def _place(self, choice: Choice) -> int:
        return self.policies.index(choice.activation_checkpointing)

    def bytes(self, choice: Choice, tokens: int | None = None) -> float:
        """What the worker that needs most needs.

        Args:
            choice: one of these.
            tokens: of the largest micro-batch there is; default: as many as there may be.
        """
        size = choice.micro_batch_tokens if tokens is None else max(1, tokens)
        count = -(-self._each * self.model.seq_len // choice.micro_batch_tokens)
        found = memory(
            replace(self.model, seq_len=size),
            self.cluster.device,
            self.machine.stack,
            replace(self.layout, micro_batch=1, checkpointing=choice.activation_checkpointing),
            max(count, self.layout.pipeline) * self.layout.data,
        )
        return found.total

    def seconds(self, choice: Choice) -> float:
        """Of a step of full-length samples; a last micro-batch that is not full takes its share."""
        samples = max(1, choice.micro_batch_tokens // self.model.seq_len)
        policy = choice.activation_checkpointing
        layout = replace(self.layout, micro_batch=samples, checkpointing=policy)
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
