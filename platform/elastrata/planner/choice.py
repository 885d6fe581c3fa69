"""The choice that `auto` stands for: all candidates, the best by the plan, and what corrects it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.parallel.parallelize import GradientSync, ParallelConfig, sync_at_first
from elastrata.planner.cluster import Cluster
from elastrata.planner.devices import device_like
from elastrata.planner.layout import MOST_SAMPLES, Layout
from elastrata.planner.memory import memory
from elastrata.planner.operations import Machine
from elastrata.planner.plan import machine_of
from elastrata.planner.step_time import step_time
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.workload.model_spec import ModelSpec

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


JointChoice = tuple[Choice, ...]
"""Of each kind."""


def best_together(kinds: Sequence[Choices], fits: Callable[[int, Choice], bool]) -> JointChoice:
    """The fastest that fit. Where a kind has room for none, all save as much memory as there is to
    be saved together, and each has micro-batches as large as it has room for.

    Args:
        kinds: all that each may choose; some that go together.
        fits: whether the kind of that number has room for a choice.
    """
    if found := fastest_together(kinds, fits):
        return found
    smallest = smallest_together(kinds)
    assert smallest is not None, "no choices that go together"
    return tuple(
        _alike_one(kind, one).best(partial(fits, number))
        for number, (kind, one) in enumerate(zip(kinds, smallest, strict=True))
    )


def fastest_together(
    kinds: Sequence[Choices], fits: Callable[[int, Choice], bool]
) -> JointChoice | None:
    """The choices with which the kind that takes longest takes least; None where a kind has room
    for none that goes with those of the others.

    Args:
        kinds: all that each may choose.
        fits: whether the kind of that number has room for a choice.
    """
    if len(kinds) == 1:
        only = partial(fits, 0)
        return (kinds[0].best(only),) if any(map(only, kinds[0].all)) else None
    found = [
        tuple(kind.best(partial(fits, number)) for number, kind in enumerate(alike))
        for alike in _alike(kinds)
        if all(any(fits(n, choice) for choice in kind.all) for n, kind in enumerate(alike))
    ]
    return min(found, key=partial(_seconds, kinds), default=None)


def smallest_together(kinds: Sequence[Choices]) -> JointChoice | None:
    """The choices that need least memory of the kind that needs most; None where there are none
    that go together."""
    if len(kinds) == 1:
        return (kinds[0].smallest,) if kinds[0].all else None
    found = [tuple(kind.smallest for kind in alike) for alike in _alike(kinds)]
    return min(found, key=partial(_bytes, kinds), default=None)


def _alike(kinds: Sequence[Choices]) -> Iterator[list[Choices]]:
    """By what is computed again and when gradients are summed: what each kind may choose then."""
    for policy, sync in reversed(list(product(kinds[0].policies, kinds[0].syncs))):
        alike = [replace(kind, policies=(policy,), syncs=(sync,)) for kind in kinds]
        if all(kind.all for kind in alike):
            yield alike


def _alike_one(kind: Choices, choice: Choice) -> Choices:
    """All that a kind may choose which computes the same things again as a choice, and sums at the
    same time."""
    way, sync = choice.activation_checkpointing, choice.gradient_sync
    return replace(kind, policies=(way,), syncs=(sync,))


def _seconds(kinds: Sequence[Choices], chosen: JointChoice) -> float:
    return max(kind.seconds(choice) for kind, choice in zip(kinds, chosen, strict=True))


def _bytes(kinds: Sequence[Choices], chosen: JointChoice) -> float:
    return max(kind.bytes(choice) for kind, choice in zip(kinds, chosen, strict=True))


def group_layout(parallel: ParallelConfig, world_size: int) -> Layout:
    """How a group of workers divides the model: as `rank_mesh` makes it.

    Args:
        parallel: the recipe's.
        world_size: workers of the group, a multiple of `parallel.group_size`.
    """
    data = world_size // parallel.group_size
    copies = data if parallel.replicate == "all" else parallel.replicate
    copies = copies if data % copies == 0 else 1
    return Layout(
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        virtual_stages=parallel.virtual_stages,
        schedule=parallel.schedule,
        stage_speeds=parallel.stage_speeds or (),
        shards=data // copies,
        copies=copies,
        gradient_sync=sync_at_first(parallel.gradient_sync),
        reshard=parallel.reshard_after_forward and copies < data,
    )


def group_cluster(device_name: str, world_size: int, per_node: int) -> Cluster:
    """The workers as the plan sees them.

    Args:
        device_name: as PyTorch has it; any CPU's is `CPU`.
        world_size: workers of the group.
        per_node: of them, on one node.
    """
    return Cluster(device=device_like(device_name), devices=world_size, per_node=per_node)


def policies(recipe: Recipe) -> tuple[Recomputation, ...]:
    """The values that `activation_checkpointing: auto` may have; zero bubble divides the backward
    pass, and what `selective` keeps is there for one."""
    if recipe.parallel.pipeline > 1 and recipe.parallel.schedule == "zero_bubble":
        return ("none", "full")
    return ("none", "selective", "full")


def phase_choices(
    recipe: Recipe,
    part: PhaseKeys,
    model: ModelSpec,
    sizes: Sequence[int],
    layout: Layout,
    cluster: Cluster,
) -> Choices:
    """The choices of a group for one phase; a single one where the recipe leaves nothing open.

    Args:
        recipe: that is trained.
        part: its phase.
        model: on samples as long as that phase's.
        sizes: tokens that a micro-batch may have, ascending.
        layout: of the group.
        cluster: the group.
    """
    policy, sync = recipe.activation_checkpointing, recipe.parallel.gradient_sync
    return Choices(
        model=model,
        cluster=cluster,
        machine=machine_of(recipe, cluster),
        layout=layout,
        batch_size=part.batch_size,
        budgets=tuple(sizes),
        policies=policies(recipe) if policy == "auto" else (policy,),
        syncs=("step", "micro_batch") if sync == "auto" else (sync,),
    )


@dataclass(frozen=True, kw_only=True)
class AutomaticPlan:
    """The plan for `auto` on a cluster. The field names are keys of `elastrata plan --json`."""

    layout: str
    """How the recipe has the devices divide the model."""
    micro_batch_tokens: int
    activation_checkpointing: str
    gradient_sync: str
    memory_bytes: float
    fits: bool
    """Whether that is within what a group dares to use of its devices."""


def planned(recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster) -> AutomaticPlan:
    """The choice of a group on all devices of a cluster, if it measured what is planned.

    Args:
        recipe: that leaves something open.
        part: one of its phases.
        model: on samples as long as that phase's.
        cluster: with a multiple of `parallel.group_size` devices.
    """
    layout = group_layout(recipe.parallel, cluster.devices)
    tokens = part.micro_batch_tokens
    choices = phase_choices(
        recipe,
        part,
        model,
        budgets(model.seq_len, part.batch_size) if tokens == "auto" else (tokens,),
        layout,
        cluster,
    )
    usable = USABLE * cluster.device.memory_bytes
    best = choices.best(lambda choice: choices.bytes(choice) <= usable)
    needed = choices.bytes(best)
    return AutomaticPlan(
        layout=layout.division,
        micro_batch_tokens=best.micro_batch_tokens,
        activation_checkpointing=best.activation_checkpointing,
        gradient_sync=best.gradient_sync,
        memory_bytes=needed,
        fits=needed <= usable,
    )
