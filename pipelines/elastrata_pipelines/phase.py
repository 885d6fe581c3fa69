"""A phase: consecutive steps of a run on one data set, or on one mixture, of one batch size but for
its warm-up."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.groups import BatchSizeWarmup, Groups, samples_in
from elastrata_pipelines.mixture import Mixture, within_limits

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class PhaseSize:
    """The steps of a phase, and the samples in them."""

    steps: int
    batch_size: int
    warmup: BatchSizeWarmup | None = None
    mixture: Mixture | None = None
    """Of its sources; None: it has one data set."""

    def samples(self, steps: int) -> int:
        """Samples in so many of its first steps."""
        return samples_in(steps, full=self.batch_size, warmup=self.warmup)

    def counts(self, steps: int) -> tuple[int, ...]:
        """Samples of each source in so many of its first steps."""
        samples = self.samples(steps)
        return self.mixture.counts(samples) if self.mixture else (samples,)


@dataclass(frozen=True, kw_only=True)
class Origin(Generic[Key]):
    """The place in another run that a run goes on from: its first steps are that run's."""

    step: int
    samples: int
    positions: Mapping[Key, int] = field(default_factory=dict)
    """Samples that were taken by then of each data set that this run reads on in the same order."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a phase in its run."""

    first_step: int = 0
    """Steps of the run before it."""
    first_sample: int = 0
    """Samples of the run before it, or before the origin where that lies in it."""
    first_position: int = 0
    """Samples of its data set that were taken by then: it goes on behind them. Of a mixture, those
    that it would have had itself, where the run goes on in the midst of it; else 0."""
    firsts: tuple[int, ...] = ()
    """Of a mixture: the position in each source's order of the mixture's first sample of it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A value: it can be sent to any process."""

    batches: Batches
    steps: int
    batch_size: int
    warmup: BatchSizeWarmup | None = None
    placement: Placement = Placement()
    limits: tuple[int | None, ...] = ()
    """Of a mixture: samples of each source that the run may have taken when the phase ends; None:
    any number."""
    redistributes: bool = False
    """Whether the others have the share of a source that has reached its limit."""

    @property
    def size(self) -> PhaseSize:
        """Its steps, and the samples in them."""
        return PhaseSize(
            steps=self.steps,
            batch_size=self.batch_size,
            warmup=self.warmup,
            mixture=self.batches.mixture,
        )

    @property
    def first_step(self) -> int:
        """Steps of the run before it."""
        return self.placement.first_step

    @property
    def last_step(self) -> int:
        """Steps of the run when it ends."""
        return self.first_step + self.steps

    def groups(self, start: Start, *, max_tokens: int, max_steps: int | None = None) -> Groups:
        """Its groups that are left at `start`, which may lie before it, in it or behind it."""
        done = max(0, start.step - self.first_step)
        seen = start.samples - self.placement.first_sample if done else 0
        return self.batches.groups(
            Start(step=done, samples=self.placement.first_position + seen),
            steps=self.steps,
            batch_size=self.batch_size,
            max_tokens=max_tokens,
            warmup=self.warmup,
            max_steps=max_steps,
            before=self.first_step,
        )


def one_after_another(
    phases: Iterable[Phase], origin: Origin[str] | None = None
) -> tuple[Phase, ...]:
    """The phases with their places.

    Args:
        phases: of a run.
        origin: where it goes on from another one, with positions by the URL of the data set.
    """
    given = list(phases)
    for number, phase in enumerate(given):
        if phase.redistributes:
            given[number] = _limited(_placed(given[: number + 1], origin)[-1])
    return tuple(_placed(given, origin))


def _placed(phases: Sequence[Phase], origin: Origin[str] | None) -> list[Phase]:
    data = [[url for url, _ in phase.batches.data_sets] for phase in phases]
    placed = placements([phase.size for phase in phases], data, origin)
    return [
        replace(phase, placement=placement, batches=phase.batches.placed(placement.firsts))
        for phase, placement in zip(phases, placed, strict=True)
    ]


def _limited(phase: Phase) -> Phase:
    """A phase that has its place, with a mixture that keeps to its limits."""
    mixture, placement = phase.batches.mixture, phase.placement
    assert mixture is not None, phase.batches.url
    most = [
        None if limit is None else max(0, limit - first)
        for limit, first in zip(phase.limits, placement.firsts, strict=True)
    ]
    samples = phase.size.samples(phase.steps)
    kept = within_limits(mixture, most, since=placement.first_position, samples=samples)
    return replace(phase, batches=phase.batches.mixed(kept))


def placements(
    sizes: Sequence[PhaseSize],
    data: Sequence[Sequence[Key]],
    origin: Origin[Key] | None = None,
) -> Iterator[Placement]:
    """The places of phases that come one after the other.

    Args:
        sizes: of each.
        data: the data sets of each, in the order of its sources.
        origin: where their run goes on from another one. Nothing is known of phases before it.
    """
    first, sample = 0, 0
    for size, keys in zip(sizes, data, strict=True):
        before = 0
        if origin and first <= origin.step < first + size.steps:
            before, sample = origin.step - first, origin.samples
        taken = positions_after(max(first, origin.step if origin else 0), sizes, data, origin)
        positions = [taken.get(key, 0) for key in keys]
        if size.mixture is None:
            yield Placement(first_step=first, first_sample=sample, first_position=positions[0])
        else:
            counts = size.counts(before)
            yield Placement(
                first_step=first,
                first_sample=sample,
                first_position=size.samples(before),
                firsts=tuple(one - own for one, own in zip(positions, counts, strict=True)),
            )
        sample += size.samples(size.steps) - size.samples(before)
        first += size.steps


def positions_after(
    step: int,
    sizes: Sequence[PhaseSize],
    data: Sequence[Sequence[Key]],
    origin: Origin[Key] | None = None,
) -> dict[Key, int]:
    """Samples that a run has taken of each data set after so many steps, at least the origin's.

    Args:
        step: steps done.
        sizes: of the phases.
        data: the data sets of each, in the order of its sources.
        origin: where the run goes on from another one.
    """
    taken, since, first = dict(origin.positions if origin else {}), origin.step if origin else 0, 0
    for size, keys in zip(sizes, data, strict=True):
        begin, end = max(since - first, 0), min(step - first, size.steps)
        if begin < end:
            for key, old, new in zip(keys, size.counts(begin), size.counts(end), strict=True):
                taken[key] = taken.get(key, 0) + new - old
        first += size.steps
    return taken
