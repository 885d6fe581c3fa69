"""Choice of the keys that are `auto`: the fastest setting that fits into memory.

The planner predicts the memory of each setting, and the peaks that steps measure correct it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from elastrata.device.capabilities import (
    current_device,
    device_name,
    memory_of_worker,
    peak_memory_bytes,
)
from elastrata.parallel.activation_checkpointing import Recomputation, initial_recomputation
from elastrata.parallel.parallelize import GradientSync
from elastrata.planner.choice import (
    USABLE,
    Choice,
    Choices,
    JointChoice,
    MemoryCorrection,
    best_together,
    group_cluster,
    group_layout,
    micro_batch_budgets,
    phase_choices,
    policies,
    smallest_together,
)
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.step.events import Chosen, RanOut
from elastrata.workload.workload import PlannableWorkload, model_spec
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKind, RankKinds, distinct_kinds

_ERROR = 1.1
"""Upper bound of the planner's relative error. A setting is refused only if its planned memory
exceeds the device's by more than this factor."""
_GIB = 2**30
_DIVIDE = (
    "use more workers or parallel.tensor to divide the model further; `elastrata plan` shows "
    "what fits"
)


def describe_fitting_choices(recipe: Recipe, phases: Sequence[Phase]) -> str:
    """Return an error line that names settings which fit by the plan, for a group that ran out of
    memory. Not collective, because the other ranks are blocked in the step."""
    device = current_device()
    memory = memory_of_worker(device, 1, recipe.workers.memory_gb)
    name = device_name(device) if device.type == "cuda" else "CPU"
    where = f"out of memory: {name}, {memory / _GIB:.1f} GiB"
    if not isinstance(recipe.workload, PlannableWorkload):
        return f"{where}: a smaller micro_batch_tokens needs less"
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    pairs = zip(recipe.parts, phases, strict=True)
    needs = [_phase(recipe, part, phase, name, world_size) for part, phase in pairs]
    # The message names one phase: the one that needs most memory.
    choices, taken = max(needs, key=lambda need: need[0].bytes(need[1]))
    smaller = choices.smaller_than(taken)
    fitting = [one for one in smaller.all if smaller.bytes(one) <= USABLE * memory]
    tried = f"{where}: {_keys(taken)} does not fit"
    if not fitting:
        return (
            f"{tried}, nor, by the plan, would smaller ones on {pluralize(world_size, 'worker')}; "
            f"{_DIVIDE}"
        )
    best = smaller.best(lambda choice: choice in fitting)
    return f"{tried}; by the plan, {_keys(best)} fits ({smaller.bytes(best) / _GIB:.1f} GiB)"


def check_smallest_fits(
    kinds: Sequence[Choices], memory: Sequence[float], names: Sequence[str]
) -> None:
    """Check that each kind of rank can fit its smallest choice, with `_ERROR` as a margin.

    Raises:
        UserError: a smallest choice needs clearly more memory; one line for each kind of rank.
    """
    lines = []
    for choices, room, name in zip(kinds, memory, names, strict=True):
        smallest = choices.smallest
        needed = choices.bytes(smallest)
        # A single choice is not automatic: the step itself will show whether it fits.
        if len(choices.all) > 1 and needed > _ERROR * room:
            who = f"a worker on {name}" if len(kinds) > 1 else "a worker"
            lines.append(
                f"micro_batch_tokens: 'auto': even with {describe_choice(smallest)} {who} "
                f"would need {needed / _GIB:.2f} GiB, but has {room / _GIB:.2f}; {_DIVIDE}"
            )
    if lines:
        raise UserError(*lines)


def ran_out_event(choice: Choice, group: str, device: torch.device) -> RanOut:
    """Return the event that reports that a choice ran out of memory."""
    text = f"{device_name(device)}: out of memory with {describe_choice(choice)}"
    return RanOut(group=group, choice=asdict(choice), text=text)


def exclude_choice(choices: Choices, one: RanOut) -> Choices:
    """Return the choices that need less than the one that ran out of memory, or all if it is not
    among them."""
    taken = next((choice for choice in choices.all if asdict(choice) == one.choice), None)
    return choices.smaller_than(taken) if taken else choices


def describe_choice(choice: Choice) -> str:
    """Return a choice in words for messages."""
    synced = "" if choice.gradient_sync == "step" else f", gradient_sync {choice.gradient_sync}"
    return (
        f"micro_batch_tokens {choice.micro_batch_tokens:,} and activation_checkpointing "
        f"{choice.activation_checkpointing}{synced}"
    )


def _phase(
    recipe: Recipe, part: PhaseKeys, phase: Phase, device: str, world_size: int
) -> tuple[Choices, Choice]:
    """Return all choices of a phase, and the one that the recipe sets (the smallest if it leaves
    keys open)."""
    found = phase.batches
    spec = model_spec(recipe.workload, found.manifest.vocabulary, found.manifest.seq_len)
    given = found.tokens_per_micro_batch
    sizes = sorted({given, *micro_batch_budgets(spec.seq_len, part.batch_size)})
    layout = group_layout(recipe.parallel, world_size)
    cluster = group_cluster(device, world_size, 1)
    one = phase_choices(recipe, part, spec, sizes, layout, cluster)
    # All policies, also those that the recipe excludes, so that the message can suggest them.
    every = replace(one, policies=policies(recipe), syncs=("step", "micro_batch"))
    if recipe.is_automatic:
        return every, one.smallest
    way, sync = one.policies[0], one.syncs[0]
    taken = Choice(micro_batch_tokens=given, activation_checkpointing=way, gradient_sync=sync)
    return every, taken


def _keys(choice: Choice) -> str:
    sync = choice.gradient_sync
    return (
        f"micro_batch_tokens={choice.micro_batch_tokens} "
        f"activation_checkpointing={choice.activation_checkpointing}"
        + (f" parallel.gradient_sync={sync}" if sync != "step" else "")
    )


_CHOSEN = "chosen"
"""Key in `Commit.extra` of the choices that groups have settled on."""
_USUAL = {"gradient_sync": "step"}
"""Default values, which commits leave out."""


class SettledChoices:
    """Choices that earlier groups have settled on, with the bytes that each needs."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        """Return the choices as a commit stores them."""
        return {_CHOSEN: self._values} if self._values else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the choices by those in a commit's `extra`."""
        known = state.get(_CHOSEN)
        # Entries that other versions wrote in another form are ignored: the choice is then measured
        # again.
        self._values = {
            key: found
            for key, found in (known.items() if isinstance(known, dict) else ())
            if isinstance(found, dict) and isinstance(found.get("bytes"), int)
        }

    def add(self, key: str, choice: Choice, needed: float) -> None:
        """Record the choice that a group has settled on."""
        values = {name: v for name, v in asdict(choice).items() if v != _USUAL.get(name)}
        self._values[key] = {**values, "bytes": round(needed)}

    def find(
        self, keys: Sequence[str], choices: Sequence[Choices], memory: Sequence[float]
    ) -> JointChoice | None:
        """Return the choice that an equal group has settled on, or None if its workers lack the
        memory."""
        found = []
        for key, own, room in zip(keys, choices, memory, strict=True):
            values = dict(self._values.get(key, {}))
            # A key without an entry counts as too large.
            if values.pop("bytes", room + 1) > room:
                return None
            found += [one for one in own.all if asdict(one) == {**_USUAL, **values}]
        # Only micro-batches may differ between kinds: collectives of all ranks have to match.
        are_alike = len({(one.activation_checkpointing, one.gradient_sync) for one in found}) == 1
        return tuple(found) if len(found) == len(keys) and are_alike else None


@dataclass(frozen=True, kw_only=True)
class PhaseChoices:
    """The choices that are available in a phase."""

    last_step: int
    kinds: tuple[Choices, ...]
    """The choices of each kind of rank."""


class ChoiceTuner:
    """One rank's part in its group's choices. All methods are collective unless they say otherwise.

    Args:
        phases: the run's phases; empty if the recipe has no `auto` key.
        way: the blocks' present activation checkpointing.
        recompute: sets the blocks' activation checkpointing.
        device: this rank's device.
        memory: bytes that this rank may use.
        synchronize: sets when gradients are synchronised.
        names: names of the kinds of ranks.
        kind: index of this rank's kind in `names`.
    """

    def __init__(
        self,
        phases: Sequence[PhaseChoices],
        way: Recomputation,
        recompute: Callable[[Recomputation], None],
        device: torch.device,
        memory: int,
        *,
        synchronize: Callable[[GradientSync], None] = lambda _: None,
        names: Sequence[str] = ("",),
        kind: int = 0,
    ) -> None:
        self._phases, self._way, self._recompute = phases, way, recompute
        self._device, self._memory = device, memory
        self._synchronize = synchronize
        self._names, self._kind = names, kind
        self._known = SettledChoices()
        # The largest negated memory is the least of each kind, whose ranks all take the same
        # choice.
        self._least_memory = [-most for (most,) in self._largest([-memory])]
        # One for each kind, as the same choice may need another share of another device.
        self._corrections = [MemoryCorrection() for _ in names]
        self._phase = -1
        self._chosen: JointChoice | None = None
        self._tokens = 0
        self._is_settled = False

    def cut(self, stream: Iterable[RankStep], tell: Callable[[Chosen], None]) -> Iterator[RankStep]:
        """Yield the steps, cut into micro-batches of the chosen size. Each choice is made when its
        step is requested, after the step before it is measured. Collective."""
        for part in stream:
            if event := self._prepare(part.step):
                tell(event)
            mine = self.cut_step(part)
            self._tokens = max(len(rows.tokens) for rows in mine.micro_batches)
            yield mine

    def cut_step(self, part: RankStep) -> RankStep:
        """Return a step of training or evaluation, cut by the present choice."""
        if self._chosen is None:
            return part
        return part.cut_for([choice.micro_batch_tokens for choice in self._chosen], self._kind)

    def foreseen(self, part: RankStep) -> RankStep | None:
        """Return a later step as `cut` will yield it, or None if its choice depends on a
        measurement that is not yet made. May be called from another thread than `cut`."""
        if not self._phases:
            return part
        phase = self._phase  # read before `_is_settled`: `cut` may begin another phase in between
        if self._is_settled and part.step <= self._phases[phase].last_step:
            return self.cut_step(part)
        return None

    def figures(self) -> dict[str, Any]:
        """Return the choices of the newest step, as fields of `StepRecord`."""
        if self._chosen is None:
            return {}
        values = self._values(self._chosen)
        return {key: value for key, value in values.items() if key != "gradient_sync"}

    def state(self) -> dict[str, Any]:
        """Return the choices that groups have settled on, by layout and phase, for a commit."""
        return self._known.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the choices of earlier groups from a commit's `extra`."""
        self._known.restore(state)

    def avoid(self, choices: Iterable[RanOut]) -> None:
        """Exclude choices that ran out of memory before, and all that need as much."""
        for one in choices:
            self._phases = [self._without(one, number) for number in range(len(self._phases))]

    def ran_out(self) -> RanOut | None:
        """Return the newest step's choice as one that ran out of memory, or None if there is no
        smaller one. Not collective, because the other ranks are blocked in the step."""
        if self._chosen is None:
            return None
        choice, number = self._chosen[self._kind], self._kind
        kinds = list(self._choices)
        kinds[number] = kinds[number].smaller_than(choice)
        if smallest_together(kinds) is None:
            return None
        return ran_out_event(choice, self._keys(self._phase)[number], self._device)

    def _without(self, one: RanOut, number: int) -> PhaseChoices:
        """Return a phase without the choices that need as much as the one that ran out of
        memory."""
        phase = self._phases[number]
        pairs = zip(phase.kinds, self._keys(number), strict=True)
        return replace(
            phase,
            kinds=tuple(
                exclude_choice(choices, one) if key == one.group else choices
                for choices, key in pairs
            ),
        )

    def _prepare(self, step: int) -> Chosen | None:
        """Choose for a step and return the event to record, or None if nothing was chosen."""
        if not self._phases:
            return None
        phase = next(n for n, one in enumerate(self._phases) if step <= one.last_step)
        if phase != self._phase:
            self._is_settled = False  # first, as `foreseen` reads it in another thread
            self._phase = phase
            return self._begin(step)
        return None if self._is_settled else self._measure(step)

    @property
    def _choices(self) -> tuple[Choices, ...]:
        return self._phases[self._phase].kinds

    @property
    def _is_open(self) -> bool:
        return any(len(kind.all) > 1 for kind in self._choices)

    def _begin(self, step: int) -> Chosen | None:
        """Choose for the first step of a phase: the choice that an equal group has settled on, or
        the next by the corrections so far (at first, the smallest)."""
        choices, memory = self._choices, self._least_memory
        if known := self._known.find(self._keys(self._phase), choices, memory):
            self._apply(known)
            self._is_settled = True
            return self._chosen_event(step, "as before in a group of this size")
        check_smallest_fits(choices, memory, self._names)
        planned = best_together(choices, lambda n, one: choices[n].bytes(one) <= USABLE * memory[n])
        for correction in self._corrections:
            correction.begin_phase()
        self._apply(self._choose_next())
        return self._chosen_event(step, f"first; the plan has {self._describe(planned)}")

    def _measure(self, step: int) -> Chosen | None:
        assert self._chosen is not None
        peak = peak_memory_bytes(self._device)
        # Memory beyond the usable share first, so that its maximum belongs to the tightest rank.
        measured = self._largest([peak - USABLE * self._memory, self._tokens, peak])
        corrections, before = self._corrections, zip(self._choices, self._chosen, strict=True)
        for own, (choices, choice), (short, tokens, _) in zip(
            corrections, before, measured, strict=True
        ):
            own.measured(choices, choice, int(tokens), -short)
        self._apply(self._choose_next())
        # All corrections have measured the same number of steps.
        self._is_settled = corrections[0].is_over
        if not self._is_settled or not self._is_open:
            return None
        # The plan adds bytes to the measured peak, e.g. for a longer micro-batch than any so far.
        for number, (_, _, most) in enumerate(measured):
            choice = self._chosen[number]
            more = corrections[number].more(self._choices[number], choice)
            self._known.add(self._keys(self._phase)[number], choice, most + max(0.0, more))
        rooms = zip((most for _, _, most in measured), self._least_memory, self._names, strict=True)
        return self._chosen_event(step, "; ".join(_peak(*room) for room in rooms))

    def _choose_next(self) -> JointChoice:
        """Return the choice for the next step, by the corrections measured so far."""
        choices, corrections = self._choices, self._corrections
        if not corrections[0].has_measured:
            # Nothing is measured yet: no choice is trusted to fit, so the smallest is taken.
            return best_together(choices, lambda *_: False)
        return best_together(choices, lambda n, one: corrections[n].fits(choices[n], one))

    def _apply(self, chosen: JointChoice) -> None:
        self._chosen = chosen
        if chosen[0].activation_checkpointing != self._way:
            self._way = chosen[0].activation_checkpointing
            # Only on a change, because setting it again would wrap and compile the blocks anew.
            self._recompute(self._way)
        self._synchronize(chosen[0].gradient_sync)

    def _chosen_event(self, step: int, why: str) -> Chosen | None:
        assert self._chosen is not None
        return Chosen(step=step, **self._values(self._chosen), text=why) if self._is_open else None

    def _values(self, chosen: JointChoice) -> dict[str, Any]:
        """Return a choice as fields of `Chosen`."""
        tokens = [choice.micro_batch_tokens for choice in chosen]
        each = dict(zip(self._names, tokens, strict=True)) if len(set(tokens)) > 1 else {}
        return {
            "micro_batch_tokens": max(tokens),
            "activation_checkpointing": chosen[0].activation_checkpointing,
            "gradient_sync": chosen[0].gradient_sync,
            **({"micro_batch_tokens_by_kind": each} if each else {}),
        }

    def _describe(self, chosen: JointChoice) -> str:
        if len(self._names) == 1:
            return describe_choice(chosen[0])
        pairs = zip(self._names, chosen, strict=True)
        return "; ".join(f"{name}: {describe_choice(choice)}" for name, choice in pairs)

    def _keys(self, phase: int) -> list[str]:
        """Return a key for each kind of rank; groups with equal keys can share a choice."""
        group = f"{self._phases[phase].kinds[0].layout.division}, phase {phase}"
        if len(self._names) == 1:
            return [group]
        return [f"{group}, {name} of {', '.join(sorted(self._names))}" for name in self._names]

    def _largest(self, values: Sequence[float]) -> list[list[float]]:
        """Return the elementwise maxima of values over the ranks of each kind. Collective."""
        # float64 holds byte counts exactly. MAX ignores -inf, which stands for other kinds.
        values_by_kind = torch.full(
            (len(self._names), len(values)), -torch.inf, dtype=torch.float64
        )
        values_by_kind[self._kind] = torch.tensor(values, dtype=torch.float64)
        # All ranks have the same phases, so either all reduce or none.
        if self._phases and dist.is_initialized():
            values_by_kind = values_by_kind.to(self._device)
            dist.all_reduce(values_by_kind, op=dist.ReduceOp.MAX)
        largest: list[list[float]] = values_by_kind.tolist()
        return largest


def _peak(most: float, memory: float, name: str) -> str:
    room = f"{most / _GIB:.2f} GiB at the peak so far, of {memory / _GIB:.2f}"
    return f"{name}: {room}" if name else room


def build_tuner(
    recipe: Recipe,
    phases: Sequence[Phase],
    recompute: Callable[[Recomputation], None],
    device: torch.device,
    *,
    world_size: int,
    per_node: int,
    synchronize: Callable[[GradientSync], None] = lambda _: None,
    kinds: RankKinds = (),
    data_rank: int = 0,
) -> ChoiceTuner:
    """Return the chooser for a group, with the choices that a recipe leaves open. Collective."""
    all_kinds = distinct_kinds(kinds)
    number = all_kinds.index(kinds[data_rank]) if kinds else 0
    open_phases = []
    if recipe.is_automatic:
        name = device_name(device) if device.type == "cuda" else "CPU"
        devices = _by_kind((number, (name, per_node)), world_size)
        open_phases = [
            PhaseChoices(
                last_step=phase.last_step,
                kinds=tuple(
                    _choices(recipe, part, phase, kind, world_size, *devices[n])
                    for n, kind in enumerate(all_kinds)
                ),
            )
            for part, phase in zip(recipe.parts, phases, strict=True)
        ]
    return ChoiceTuner(
        open_phases,
        initial_recomputation(recipe.activation_checkpointing),
        recompute,
        device,
        memory_of_worker(device, per_node, recipe.workers.memory_gb),
        synchronize=synchronize,
        names=[kind.name for kind in all_kinds],
        kind=number,
    )


def _choices(
    recipe: Recipe,
    part: PhaseKeys,
    phase: Phase,
    kind: RankKind,
    world_size: int,
    device: str,
    per_node: int,
) -> Choices:
    """Return all choices of a kind of rank in a phase."""
    data = phase.batches
    return phase_choices(
        recipe,
        part,
        model_spec(recipe.workload, data.manifest.vocabulary, data.manifest.seq_len),
        _budgets(data, kind),
        group_layout(recipe.parallel, world_size),
        group_cluster(device, world_size, per_node),
    )


def _budgets(data: Batches, kind: RankKind) -> list[int]:
    """Return the token budgets that a kind's micro-batches may have, ascending."""
    sizes = (data.tokens_per_micro_batch, *data.larger_budgets)
    # A kind whose limit is below all sizes has one size, its limit.
    return [size for size in sizes if kind.budget(size) == size] or [kind.budget(sizes[0])]


def _by_kind(value: tuple[int, Any], world_size: int) -> dict[int, Any]:
    """Return for each kind the value of its first rank, equal on every rank. Collective."""
    values = [value] * world_size
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    # Reversed, so that the first rank of a kind wins: values may differ between machines.
    return dict(reversed(values))
