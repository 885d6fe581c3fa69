"""The automatic choices of a group of workers, which begins with what needs least memory, measures,
and settles. Knows no Ray.

The choice is the same on every rank, as all compute it from the same numbers. It changes how a step
is cut and what is computed again, and neither samples nor order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from elastrata.core.device import device_name, memory_of_worker, peak_memory_bytes
from elastrata.core.events import Chosen, RanOut
from elastrata.core.parallelize import GradientSync
from elastrata.core.recomputation import Recomputation, way_at_first
from elastrata.core.workload import model_spec
from elastrata.planner.choice import USABLE, Choice, Choices, Correction
from elastrata.planner.group import group_cluster, group_layout, phase_choices
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.out_of_memory import ran_out, refuse_what_never_fits, without, words
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.phase import Phase

_CHOSEN = "chosen"
"""The key of `Commit.extra` with what groups have settled on."""
_GIB = 2**30
_USUAL = {"gradient_sync": "step"}
"""Commits leave that out."""
Known = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PhaseChoices:
    """The choices that there are in a phase."""

    last_step: int
    choices: Choices


class Automatic:
    """One rank's part in the choices of its group. All its methods are for all ranks alike.

    Args:
        phases: of the run; none where its recipe leaves nothing open.
        way: what blocks compute again now.
        recompute: has them compute again something else.
        device: of this rank.
        memory: bytes that this rank may use.
        synchronize: has gradients summed at other times.
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
    ) -> None:
        self._phases, self._way, self._recompute = phases, way, recompute
        self._device, self._memory = device, memory
        self._synchronize = synchronize
        self._known: Known = {}
        self._least_memory = -self._largest([-memory])[0]
        self._correction = Correction()
        self._phase = -1
        self._choice: Choice | None = None
        self._tokens = 0
        self._is_settled = False

    def cut(self, stream: Iterable[RankStep], tell: Callable[[Chosen], None]) -> Iterator[RankStep]:
        """The steps, each cut as it is chosen when it is asked for: the step before it is
        done by then, and is measured. Collective.

        Args:
            stream: this rank's part of all steps that are left.
            tell: called with every choice that is to be recorded.
        """
        for part in stream:
            if news := self._prepare(part.step):
                tell(news)
            mine = self.as_chosen(part)
            self._tokens = max(len(rows.tokens) for rows in mine.micro_batches)
            yield mine

    def as_chosen(self, part: RankStep) -> RankStep:
        """A step, of training or of evaluation, cut as steps are now."""
        return part if self._choice is None else part.cut_for(self._choice.micro_batch_tokens)

    def foreseen(self, part: RankStep) -> RankStep | None:
        """A step as `cut` will have it, while the step before it is still trained; None where that
        is measured first. May be called beside `cut`, of any step to come."""
        if not self._phases:
            return part
        phase = self._phase  # before it is asked whether that is settled: `cut` may begin a phase
        if self._is_settled and part.step <= self._phases[phase].last_step:
            return self.as_chosen(part)
        return None

    def figures(self) -> dict[str, Any]:
        """The choices that the newest step was taken with: fields of `StepRecord`."""
        if self._choice is None:
            return {}
        return {
            "micro_batch_tokens": self._choice.micro_batch_tokens,
            "activation_checkpointing": self._choice.activation_checkpointing,
        }

    def state(self) -> dict[str, Any]:
        """The choices that groups have settled on, by layout and phase: a commit keeps them."""
        return {_CHOSEN: self._known} if self._known else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what groups before have settled on, as a commit's `extra` says it."""
        known = state.get(_CHOSEN)
        self._known = {
            key: found
            for key, found in (known.items() if isinstance(known, dict) else ())
            if isinstance(found, dict) and isinstance(found.get("bytes"), int)
        }

    def avoid(self, choices: Iterable[RanOut]) -> None:
        """Takes none of these, nor any that needs as much: they ran out of memory before."""
        for one in choices:
            self._phases = [
                replace(phase, choices=without(phase.choices, one))
                if one.group == _kind(phase.choices, number)
                else phase
                for number, phase in enumerate(self._phases)
            ]

    def ran_out(self) -> RanOut | None:
        """The newest step's choice, as one that ran out of memory; None where there is none, or no
        smaller one. Not collective, as the other ranks wait in the step."""
        if self._choice is None:
            return None
        return ran_out(self._choices, self._choice, self._key, self._device)

    def _prepare(self, step: int) -> Chosen | None:
        """Chooses for a step; returns what is to be recorded."""
        if not self._phases:
            return None
        phase = next(n for n, one in enumerate(self._phases) if step <= one.last_step)
        if phase != self._phase:
            self._is_settled = False  # first, as `foreseen` looks at it
            self._phase = phase
            return self._begin(step)
        return None if self._is_settled else self._measure(step)

    @property
    def _choices(self) -> Choices:
        return self._phases[self._phase].choices

    @property
    def _key(self) -> str:
        return _kind(self._choices, self._phase)

    def _begin(self, step: int) -> Chosen | None:
        """The first choice of a phase: the one of a group like this, or the smallest, or what
        follows from the phase before."""
        choices, known = self._choices, self._known_choice()
        if known:
            self._take(known)
            self._is_settled = True
            return self._news(step, "as before in such a group")
        refuse_what_never_fits(choices, self._least_memory)
        planned = choices.best(lambda one: choices.bytes(one) <= USABLE * self._least_memory)
        self._correction.begin_phase()
        self._take(self._correction.next(choices))
        if len(choices.all) == 1:
            return None
        return self._news(step, f"first; the plan has {words(planned)}")

    def _measure(self, step: int) -> Chosen | None:
        assert self._choice is not None
        peak = peak_memory_bytes(self._device)
        short = peak - USABLE * self._memory
        short, tokens, most = self._largest([short, self._tokens, peak])
        correction, choices = self._correction, self._choices
        correction.measured(choices, self._choice, int(tokens), -short)
        self._take(correction.next(choices))
        self._is_settled = correction.is_over
        if not self._is_settled or len(choices.all) == 1:
            return None
        needed = most + max(0.0, correction.more(choices, self._choice))
        values = asdict(self._choice)
        values = {key: value for key, value in values.items() if value != _USUAL.get(key)}
        self._known[self._key] = {**values, "bytes": round(needed)}
        room = f"{most / _GIB:.2f} GiB at the peak so far, of {self._least_memory / _GIB:.2f}"
        return self._news(step, room)

    def _known_choice(self) -> Choice | None:
        """The choice that a group of this layout has settled on, where it fits these workers,
        too."""
        known = self._known.get(self._key)
        if known is None or known["bytes"] > self._least_memory:
            return None
        values = {key: value for key, value in known.items() if key != "bytes"}
        return next((one for one in self._choices.all if asdict(one) == {**_USUAL, **values}), None)

    def _take(self, choice: Choice) -> None:
        self._choice = choice
        if choice.activation_checkpointing != self._way:
            self._way = choice.activation_checkpointing
            self._recompute(self._way)
        self._synchronize(choice.gradient_sync)

    def _news(self, step: int, why: str) -> Chosen:
        assert self._choice is not None
        return Chosen(step=step, **asdict(self._choice), text=why)

    def _largest(self, values: Sequence[float]) -> list[float]:
        """The largest value over all ranks."""
        told = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self._phases and dist.is_initialized():
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        largest: list[float] = told.tolist()
        return largest


def _kind(choices: Choices, phase: int) -> str:
    """The kind of a group: what it chooses holds for others of it."""
    return f"{choices.layout.division}, phase {phase}"


def automatic(
    recipe: Recipe,
    phases: Sequence[Phase],
    recompute: Callable[[Recomputation], None],
    device: torch.device,
    *,
    world_size: int,
    per_node: int,
    synchronize: Callable[[GradientSync], None] = lambda _: None,
) -> Automatic:
    """A group's choices, as a recipe leaves them open. Collective.

    Args:
        recipe: that is trained.
        phases: its data.
        recompute: has the model's blocks compute again something else.
        device: of this rank.
        world_size: workers of the group.
        per_node: of them, on this node.
        synchronize: has the model's gradients summed at other times.
    """
    open_phases = []
    if recipe.is_automatic:
        name = device_name(device) if device.type == "cuda" else "CPU"
        cluster = group_cluster(_of_rank_0(name), world_size, _of_rank_0(per_node))
        layout = group_layout(recipe.parallel, world_size)
        open_phases = [
            PhaseChoices(
                last_step=phase.last_step,
                choices=phase_choices(
                    recipe,
                    part,
                    model_spec(recipe.workload, found.manifest.vocabulary, found.manifest.seq_len),
                    (found.tokens_per_micro_batch, *found.larger_budgets),
                    layout,
                    cluster,
                ),
            )
            for part, phase in zip(recipe.parts, phases, strict=True)
            for found in [phase.batches]
        ]
    return Automatic(
        open_phases,
        way_at_first(recipe.activation_checkpointing),
        recompute,
        device,
        memory_of_worker(device, per_node, recipe.workers.memory_gb),
        synchronize=synchronize,
    )


def _of_rank_0(value: Any) -> Any:
    """Its value, on every rank: they may differ from machine to machine."""
    agreed = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(agreed, src=0)
    return agreed[0]
