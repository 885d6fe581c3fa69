"""The automatic choices of a group of workers, which begins with what needs least memory, measures,
and settles. Knows no Ray.

Every kind of worker, by its memory, has a number of tokens of its own. All ranks know the choices
of all kinds, as they compute them from the same numbers. They change how a step is cut and what is
computed again, and neither samples nor order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from elastrata.core.device import peak_memory_bytes
from elastrata.core.events import Chosen, RanOut
from elastrata.core.parallelize import GradientSync
from elastrata.core.recomputation import Recomputation
from elastrata.planner.choice import (
    USABLE,
    Choices,
    Correction,
    JointChoice,
    best_together,
    smallest_together,
)
from elastrata.trainer.known_choices import KnownChoices
from elastrata.trainer.out_of_memory import ran_out, refuse_what_never_fits, without, words
from elastrata_pipelines.payload import RankStep

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PhaseChoices:
    """The choices that there are in a phase."""

    last_step: int
    kinds: tuple[Choices, ...]
    """Of each kind of ranks."""


class Automatic:
    """One rank's part in the choices of its group. All its methods are for all ranks alike.

    Args:
        phases: of the run; none where its recipe leaves nothing open.
        way: what blocks compute again now.
        recompute: has them compute again something else.
        device: of this rank.
        memory: bytes that this rank may use.
        synchronize: has gradients summed at other times.
        names: of the kinds of ranks.
        kind: the number of this rank's.
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
        self._known = KnownChoices()
        self._least_memory = [-most for (most,) in self._largest([-memory])]
        self._corrections = [Correction() for _ in names]
        self._phase = -1
        self._chosen: JointChoice | None = None
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
        if self._chosen is None:
            return part
        return part.cut_for([choice.micro_batch_tokens for choice in self._chosen], self._kind)

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
        if self._chosen is None:
            return {}
        values = self._values(self._chosen)
        return {key: value for key, value in values.items() if key != "gradient_sync"}

    def state(self) -> dict[str, Any]:
        """The choices that groups have settled on, by layout and phase: a commit keeps them."""
        return self._known.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what groups before have settled on, as a commit's `extra` says it."""
        self._known.restore(state)

    def avoid(self, choices: Iterable[RanOut]) -> None:
        """Takes none of these, nor any that needs as much: they ran out of memory before."""
        for one in choices:
            self._phases = [self._without(one, number) for number in range(len(self._phases))]

    def ran_out(self) -> RanOut | None:
        """The newest step's choice, as one that ran out of memory; None where there is none, or no
        smaller one. Not collective, as the other ranks wait in the step."""
        if self._chosen is None:
            return None
        choice, number = self._chosen[self._kind], self._kind
        kinds = list(self._choices)
        kinds[number] = kinds[number].smaller_than(choice)
        if smallest_together(kinds) is None:
            return None
        return ran_out(choice, self._keys(self._phase)[number], self._device)

    def _without(self, one: RanOut, number: int) -> PhaseChoices:
        """A phase in which the kind that ran out of memory with a choice has smaller ones."""
        phase = self._phases[number]
        pairs = zip(phase.kinds, self._keys(number), strict=True)
        return replace(
            phase,
            kinds=tuple(
                without(choices, one) if key == one.group else choices for choices, key in pairs
            ),
        )

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
    def _choices(self) -> tuple[Choices, ...]:
        return self._phases[self._phase].kinds

    @property
    def _is_open(self) -> bool:
        return any(len(kind.all) > 1 for kind in self._choices)

    def _begin(self, step: int) -> Chosen | None:
        """The first choice of a phase: the one of a group like this, or the smallest, or what
        follows from the phase before."""
        choices, memory = self._choices, self._least_memory
        if known := self._known.find(self._keys(self._phase), choices, memory):
            self._take(known)
            self._is_settled = True
            return self._news(step, "as before in such a group")
        refuse_what_never_fits(choices, memory, self._names)
        planned = best_together(choices, lambda n, one: choices[n].bytes(one) <= USABLE * memory[n])
        for correction in self._corrections:
            correction.begin_phase()
        self._take(self._next())
        return self._news(step, f"first; the plan has {self._words(planned)}")

    def _measure(self, step: int) -> Chosen | None:
        assert self._chosen is not None
        peak = peak_memory_bytes(self._device)
        measured = self._largest([peak - USABLE * self._memory, self._tokens, peak])
        corrections, before = self._corrections, zip(self._choices, self._chosen, strict=True)
        for own, (choices, choice), (short, tokens, _) in zip(
            corrections, before, measured, strict=True
        ):
            own.measured(choices, choice, int(tokens), -short)
        self._take(self._next())
        self._is_settled = corrections[0].is_over
        if not self._is_settled or not self._is_open:
            return None
        for number, (_, _, most) in enumerate(measured):
            choice = self._chosen[number]
            more = corrections[number].more(self._choices[number], choice)
            self._known.add(self._keys(self._phase)[number], choice, most + max(0.0, more))
        rooms = zip((most for _, _, most in measured), self._least_memory, self._names, strict=True)
        return self._news(step, "; ".join(_peak(*room) for room in rooms))

    def _next(self) -> JointChoice:
        """The choice for the next step, by what was measured."""
        choices, corrections = self._choices, self._corrections
        if not corrections[0].has_measured:
            return best_together(choices, lambda *_: False)
        return best_together(choices, lambda n, one: corrections[n].fits(choices[n], one))

    def _take(self, chosen: JointChoice) -> None:
        self._chosen = chosen
        if chosen[0].activation_checkpointing != self._way:
            self._way = chosen[0].activation_checkpointing
            self._recompute(self._way)
        self._synchronize(chosen[0].gradient_sync)

    def _news(self, step: int, why: str) -> Chosen | None:
        assert self._chosen is not None
        return Chosen(step=step, **self._values(self._chosen), text=why) if self._is_open else None

    def _values(self, chosen: JointChoice) -> dict[str, Any]:
        """Fields of `Chosen`."""
        tokens = [choice.micro_batch_tokens for choice in chosen]
        each = dict(zip(self._names, tokens, strict=True)) if len(set(tokens)) > 1 else {}
        return {
            "micro_batch_tokens": max(tokens),
            "activation_checkpointing": chosen[0].activation_checkpointing,
            "gradient_sync": chosen[0].gradient_sync,
            **({"micro_batch_tokens_by_kind": each} if each else {}),
        }

    def _words(self, chosen: JointChoice) -> str:
        if len(self._names) == 1:
            return words(chosen[0])
        pairs = zip(self._names, chosen, strict=True)
        return "; ".join(f"{name}: {words(choice)}" for name, choice in pairs)

    def _keys(self, phase: int) -> list[str]:
        """The kind of each kind's group: what it chooses holds for others of it."""
        group = f"{self._phases[phase].kinds[0].layout.division}, phase {phase}"
        if len(self._names) == 1:
            return [group]
        return [f"{group}, {name} of {', '.join(sorted(self._names))}" for name in self._names]

    def _largest(self, values: Sequence[float]) -> list[list[float]]:
        """By kind, the largest values over its ranks."""
        told = torch.full((len(self._names), len(values)), -torch.inf, dtype=torch.float64)
        told[self._kind] = torch.tensor(values, dtype=torch.float64)
        if self._phases and dist.is_initialized():
            told = told.to(self._device)
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        largest: list[list[float]] = told.tolist()
        return largest


def _peak(most: float, memory: float, name: str) -> str:
    room = f"{most / _GIB:.2f} GiB at the peak so far, of {memory / _GIB:.2f}"
    return f"{name}: {room}" if name else room
