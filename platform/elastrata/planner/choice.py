"""Selection of the values of `auto` keys: candidates, ranking by the plan, and correction by
measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.parallel.parallelize import GradientSync, ParallelConfig, initial_gradient_sync
from elastrata.planner.cluster import Cluster
from elastrata.planner.devices import match_device
from elastrata.planner.layout import MOST_SAMPLES, Layout
from elastrata.planner.memory import memory
from elastrata.planner.operations import Machine
from elastrata.planner.plan import build_machine
from elastrata.planner.step_time import step_time
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.workload.model_spec import ModelSpec

# The plan does not model the launch cost of each micro-batch.
_EQUALLY_FAST = 1.01
"""Choices within this factor of the fastest one count as equally fast, and the one with the largest
micro-batch wins."""
MEASURED_STEPS = 4
"""Steps of a phase after which the choice no longer changes."""
USABLE = 0.9
"""Usable share of a worker's memory. The rest is a reserve for peaks that no step has shown yet."""
_MARGIN = 1.1
"""Safety factor on the additional memory of a choice compared with a measured one."""
_SIGNIFICANT_GROWTH = 1.05
"""Factor by which the planned memory of a step must grow before the step corrects the plan."""
# After one step the plan's error about growth is still unknown.
_FIRST_SHARE = 0.5
"""Share of the free memory after the first step that the second step may use."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Values for the recipe keys with the same names as the fields."""

    micro_batch_tokens: int
    activation_checkpointing: Recomputation
    gradient_sync: GradientSync = "step"
    """Key of the section `parallel`."""


def micro_batch_budgets(longest: int, batch_size: int) -> tuple[int, ...]:
    """Return the token numbers that `micro_batch_tokens: auto` may resolve to, ascending.

    They hold 1, 2, 4... of the longest samples, up to the batch size or `MOST_SAMPLES`.

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
    """Candidate choices for one phase of a recipe on one group of workers."""

    model: ModelSpec
    cluster: Cluster
    machine: Machine
    layout: Layout
    """Layout of the group. Its `micro_batch` and `checkpointing` are ignored."""
    batch_size: int
    budgets: tuple[int, ...]
    """Ascending."""
    policies: tuple[Recomputation, ...]
    """Ordered from least to most recomputation."""
    syncs: tuple[GradientSync, ...] = ("step",)
    below: float = math.inf
    """Exclusive upper bound in planned bytes. Choices of this size or larger have run out of
    memory."""

    @cached_property
    def all(self) -> tuple[Choice, ...]:
        """All candidates below the memory bound."""
        # A budget is useless if half of it already holds all samples of a rank.
        most = 2 * self._samples_per_rank * self.model.seq_len
        useful = (
            Choice(micro_batch_tokens=budget, activation_checkpointing=policy, gradient_sync=sync)
            for budget, policy, sync in product(self.budgets, self.policies, self.syncs)
            if budget < most or budget == self.budgets[0]
        )
        return tuple(choice for choice in useful if self.bytes(choice) < self.below)

    def smaller_than(self, choice: Choice) -> Choices:
        """Return the choices that need less memory than a given one, by the plan."""
        return replace(self, below=min(self.below, self.bytes(choice)))

    @property
    def _samples_per_rank(self) -> int:
        """Largest number of samples of a rank in a step."""
        return -(-self.batch_size // self.layout.data)

    @property
    def smallest(self) -> Choice:
        """The choice with the least memory; among equals, the one with the most recomputation."""
        return min(self.all, key=lambda choice: (self.bytes(choice), -self._policy_index(choice)))

    def _policy_index(self, choice: Choice) -> int:
        return self.policies.index(choice.activation_checkpointing)

    def bytes(self, choice: Choice, tokens: int | None = None) -> float:
        """Return the memory of the worker that needs most, in bytes.

        Args:
            choice: one of these choices.
            tokens: tokens of the largest actual micro-batch. Default: the budget of the choice.
        """
        size = choice.micro_batch_tokens if tokens is None else max(1, tokens)
        count = -(-self._samples_per_rank * self.model.seq_len // choice.micro_batch_tokens)
        needed = memory(
            # One long sample stands for a micro-batch that packs several samples without padding.
            replace(self.model, seq_len=size),
            self.cluster.device,
            self.machine.stack,
            replace(self._layout(choice), micro_batch=1),
            # A pipeline runs at least as many micro-batches as it has stages.
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
        """Return the seconds of a step of full-length samples."""
        samples = max(1, choice.micro_batch_tokens // self.model.seq_len)
        layout = replace(self._layout(choice), micro_batch=samples)
        full = layout.micro_batches(self.batch_size) * samples * layout.data
        time = step_time(self.model, self.cluster, self.machine, layout, self.batch_size)
        # A partial last micro-batch takes time in proportion to its samples.
        return time.total * self.batch_size / full

    def best(self, fits: Callable[[Choice], bool]) -> Choice:
        """Return the fastest choice that fits, or the smallest one if none fits."""
        fitting_choices = [choice for choice in self.all if fits(choice)]
        if not fitting_choices:
            return self.smallest
        seconds = {choice: self.seconds(choice) for choice in fitting_choices}
        least = min(seconds.values())
        fast_choices = [
            choice for choice in fitting_choices if seconds[choice] <= _EQUALLY_FAST * least
        ]
        return max(fast_choices, key=lambda choice: (choice.micro_batch_tokens, -seconds[choice]))


class MemoryCorrection:
    """Measurements of a group of workers that determine the choice for the next step.

    The first step uses the choice with the least memory. Later steps rely on measurements, and the
    plan only provides differences: how much more memory another choice needs than a measured step.
    If steps show that the plan underestimates growth, its differences are scaled up.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._has_grown = False
        self._needed: float | None = None
        """Planned bytes of the step in which `_room` was measured."""
        self._room = 0.0
        """Usable bytes that were free in that step."""
        self._factor = 1.0

    def begin_phase(self) -> None:
        """Start over with the choices of a new phase, but keep the measurements."""
        self._steps = 0

    @property
    def is_over(self) -> bool:
        """True once enough steps were measured."""
        return self._steps >= MEASURED_STEPS

    def measured(self, choices: Choices, choice: Choice, tokens: int, room: float) -> None:
        """Record the memory measurement of a step.

        Args:
            choices: candidates of the step.
            choice: choice that the step used.
            tokens: tokens of its largest micro-batch on any rank.
            room: usable bytes that were free at the peak since the group began, on the rank with
                the least; negative if usage exceeded the limit.
        """
        self._steps += 1
        needed = choices.bytes(choice, tokens)
        if self._needed is None:
            self._needed, self._room = needed, room
        elif needed >= _SIGNIFICANT_GROWTH * self._needed:
            self._has_grown = True
            # The factor never drops below 1: the plan may only be corrected towards more memory.
            self._factor = max(1.0, (self._room - room) / (needed - self._needed))
            self._needed, self._room = needed, room
        elif needed > self._needed or room < self._room:
            self._needed, self._room = needed, room

    def more(self, choices: Choices, choice: Choice) -> float:
        """Return the bytes that a choice needs beyond the measured step; negative if it needs
        less."""
        assert self._needed is not None
        growth = choices.bytes(choice) - self._needed
        # Dividing a negative growth by the factor keeps the estimate pessimistic in both
        # directions.
        factor = _MARGIN * self._factor
        return growth * factor if growth > 0 else growth / factor

    @property
    def has_measured(self) -> bool:
        """True once a step was measured."""
        return self._needed is not None

    def fits(self, choices: Choices, choice: Choice) -> bool:
        """Return whether the next step has room for a choice. At least one step must have been
        measured."""
        is_first = self._steps == 1 and not self._has_grown and self._room > 0
        room = self._room * (_FIRST_SHARE if is_first else 1.0)
        return self.more(choices, choice) <= room

    def next(self, choices: Choices) -> Choice:
        """Return the choice for the next step."""
        if not self.has_measured:
            return choices.smallest
        return choices.best(lambda choice: self.fits(choices, choice))


JointChoice = tuple[Choice, ...]
"""One choice for each kind."""


def best_together(kinds: Sequence[Choices], fits: Callable[[int, Choice], bool]) -> JointChoice:
    """Return the fastest compatible choices that fit.

    If a kind has no choice that fits, all kinds use the recomputation and gradient sync with the
    least memory, and each kind uses the largest micro-batches that it has room for.

    Args:
        kinds: candidates of each kind; at least one compatible combination exists.
        fits: whether the kind with the given index has room for a choice.
    """
    if found := fastest_together(kinds, fits):
        return found
    smallest = smallest_together(kinds)
    # The trainer gives up before no compatible choices remain.
    assert smallest is not None, "no choices that go together"
    return tuple(
        _restrict_to(kind, one).best(partial(fits, number))
        for number, (kind, one) in enumerate(zip(kinds, smallest, strict=True))
    )


def fastest_together(
    kinds: Sequence[Choices], fits: Callable[[int, Choice], bool]
) -> JointChoice | None:
    """Return the compatible choices that minimise the time of the slowest kind, or None if a kind
    has room for no compatible choice.

    Args:
        kinds: candidates of each kind.
        fits: whether the kind with the given index has room for a choice.
    """
    if len(kinds) == 1:
        fits_kind = partial(fits, 0)
        return (kinds[0].best(fits_kind),) if any(map(fits_kind, kinds[0].all)) else None
    found = [
        tuple(kind.best(partial(fits, number)) for number, kind in enumerate(compatible))
        for compatible in _compatible_choices(kinds)
        if all(any(fits(n, choice) for choice in kind.all) for n, kind in enumerate(compatible))
    ]
    return min(found, key=partial(_slowest_seconds, kinds), default=None)


def smallest_together(kinds: Sequence[Choices]) -> JointChoice | None:
    """Return the compatible choices that minimise the memory of the kind that needs most, or None
    if no choices are compatible."""
    if len(kinds) == 1:
        return (kinds[0].smallest,) if kinds[0].all else None
    found = [
        tuple(kind.smallest for kind in compatible) for compatible in _compatible_choices(kinds)
    ]
    return min(found, key=partial(_largest_bytes, kinds), default=None)


def _compatible_choices(kinds: Sequence[Choices]) -> Iterator[list[Choices]]:
    """Yield the candidates of each kind, restricted to one recomputation policy and one gradient
    sync."""
    # The trainer applies one recomputation policy and one gradient sync to the whole group.
    for policy, sync in reversed(list(product(kinds[0].policies, kinds[0].syncs))):
        restricted = [replace(kind, policies=(policy,), syncs=(sync,)) for kind in kinds]
        if all(kind.all for kind in restricted):
            yield restricted


def _restrict_to(kind: Choices, choice: Choice) -> Choices:
    """Return the choices of a kind with the recomputation and gradient sync of a given choice."""
    policy, sync = choice.activation_checkpointing, choice.gradient_sync
    return replace(kind, policies=(policy,), syncs=(sync,))


def _slowest_seconds(kinds: Sequence[Choices], chosen: JointChoice) -> float:
    return max(kind.seconds(choice) for kind, choice in zip(kinds, chosen, strict=True))


def _largest_bytes(kinds: Sequence[Choices], chosen: JointChoice) -> float:
    return max(kind.bytes(choice) for kind, choice in zip(kinds, chosen, strict=True))


def group_layout(parallel: ParallelConfig, world_size: int) -> Layout:
    """Return the layout of a group of workers, as `rank_mesh` divides the model.

    Args:
        parallel: section of the recipe.
        world_size: workers of the group, a multiple of `parallel.group_size`.
    """
    data = world_size // parallel.group_size
    copies = data if parallel.replicate == "all" else parallel.replicate
    # `rank_mesh` falls back to one copy if the ranks cannot be divided evenly.
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
        gradient_sync=initial_gradient_sync(parallel.gradient_sync),
        reshard=parallel.reshard_after_forward and copies < data,
    )


def group_cluster(device_name: str, world_size: int, per_node: int) -> Cluster:
    """Return the cluster that represents a group of workers in the plan.

    Args:
        device_name: name by PyTorch; `CPU` for any CPU.
        world_size: workers of the group.
        per_node: workers on one node.
    """
    return Cluster(device=match_device(device_name), devices=world_size, per_node=per_node)


def policies(recipe: Recipe) -> tuple[Recomputation, ...]:
    """Return the values that `activation_checkpointing: auto` may resolve to."""
    if recipe.parallel.pipeline > 1 and recipe.parallel.schedule == "zero_bubble":
        # Zero bubble splits the backward pass, but activations saved by `selective` serve only one
        # pass.
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
    """Return the choices of a group for one phase; exactly one if the recipe has no `auto` key.

    Args:
        recipe: recipe to train.
        part: phase of the recipe.
        model: model with the phase's sample length.
        sizes: allowed tokens of a micro-batch, ascending.
        layout: layout of the group.
        cluster: devices of the group.
    """
    policy, sync = recipe.activation_checkpointing, recipe.parallel.gradient_sync
    return Choices(
        model=model,
        cluster=cluster,
        machine=build_machine(recipe, cluster),
        layout=layout,
        batch_size=part.batch_size,
        budgets=tuple(sizes),
        policies=policies(recipe) if policy == "auto" else (policy,),
        syncs=("step", "micro_batch") if sync == "auto" else (sync,),
    )


@dataclass(frozen=True, kw_only=True)
class AutomaticPlan:
    """Plan for `auto` on a cluster. The field names are keys of `elastrata plan --json`."""

    layout: str
    """Division of the model among devices, as the recipe specifies it."""
    micro_batch_tokens: int
    activation_checkpointing: str
    gradient_sync: str
    memory_bytes: float
    fits: bool
    """True if the memory is within the usable share of a device."""


def plan_automatic_choice(
    recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster
) -> AutomaticPlan:
    """Return the choice of a group on all devices of a cluster, assuming that measurements match
    the plan.

    Args:
        recipe: recipe with an `auto` key.
        part: phase of the recipe.
        model: model with the phase's sample length.
        cluster: cluster with a multiple of `parallel.group_size` devices.
    """
    layout = group_layout(recipe.parallel, cluster.devices)
    tokens = part.micro_batch_tokens
    choices = phase_choices(
        recipe,
        part,
        model,
        micro_batch_budgets(model.seq_len, part.batch_size) if tokens == "auto" else (tokens,),
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
