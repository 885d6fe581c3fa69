"""Phases: consecutive steps of a run with one data set or mixture, and one batch size after its
warm-up."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.groups import BatchSizeWarmup, Groups, count_samples
from elastrata_pipelines.mixture import Mixture, apply_limits

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class PhaseSize:
    """Numbers of steps and samples of a phase."""

    steps: int
    batch_size: int
    warmup: BatchSizeWarmup | None = None
    mixture: Mixture | None = None
    """Mixture of the sources; None for a single data set."""

    def samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` steps."""
        return count_samples(steps, full=self.batch_size, warmup=self.warmup)

    def counts(self, steps: int) -> tuple[int, ...]:
        """Return the number of samples of each source in the first `steps` steps."""
        samples = self.samples(steps)
        return self.mixture.counts(samples) if self.mixture else (samples,)


@dataclass(frozen=True, kw_only=True)
class Origin(Generic[Key]):
    """The point in another run from which this run continues. The first steps are the other
    run's."""

    step: int
    samples: int
    positions: Mapping[Key, int] = field(default_factory=dict)
    """Samples already taken of each data set that this run continues to read in the same order."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a phase in its run."""

    first_step: int = 0
    """Number of steps of the run before the phase."""
    first_sample: int = 0
    """Number of samples of the run before the phase, or before the origin if that is inside the
    phase."""
    first_position: int = 0
    """Position in the data set at which the phase begins, which is the number of samples already
    taken. For a mixture, the position in the mixture if the run continues inside the phase, else
    0."""
    firsts: tuple[int, ...] = ()
    """For a mixture: position in each source's order of the mixture's first sample of that
    source."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps on one data set or mixture. The value can be sent to any process."""

    batches: Batches
    steps: int
    batch_size: int
    warmup: BatchSizeWarmup | None = None
    placement: Placement = Placement()
    limits: tuple[int | None, ...] = ()
    """For a mixture: maximum number of samples of each source that the run may have taken at the
    end of the phase; None for no limit."""
    redistributes: bool = False
    """Whether the share of a source that has reached its limit goes to the others."""

    @property
    def size(self) -> PhaseSize:
        """Numbers of steps and samples of the phase."""
        return PhaseSize(
            steps=self.steps,
            batch_size=self.batch_size,
            warmup=self.warmup,
            mixture=self.batches.mixture,
        )

    @property
    def first_step(self) -> int:
        """Number of steps of the run before the phase."""
        return self.placement.first_step

    @property
    def last_step(self) -> int:
        """Number of steps of the run at the end of the phase."""
        return self.first_step + self.steps

    def groups(self, start: Start, *, max_tokens: int, max_steps: int | None = None) -> Groups:
        """Return the groups that remain at `start`, which may be before, inside or after the
        phase."""
        # A start before the phase leaves all of it, a start behind it leaves no group.
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


def place_phases(phases: Iterable[Phase], origin: Origin[str] | None = None) -> tuple[Phase, ...]:
    """Return the phases with their placements.

    Args:
        phases: phases of a run.
        origin: point from which the run continues another one, with positions by data set URL.
    """
    given = list(phases)
    # The limits of a phase change the counts of its mixture, and with them the positions at which
    # later phases begin: phases are limited in order.
    for number, phase in enumerate(given):
        if phase.redistributes:
            given[number] = _apply_limits(_place_phases(given[: number + 1], origin)[-1])
    return tuple(_place_phases(given, origin))


def _place_phases(phases: Sequence[Phase], origin: Origin[str] | None) -> list[Phase]:
    data = [[url for url, _ in phase.batches.data_sets] for phase in phases]
    phase_placements = placements([phase.size for phase in phases], data, origin)
    return [
        replace(phase, placement=placement, batches=phase.batches.placed(placement.firsts))
        for phase, placement in zip(phases, phase_placements, strict=True)
    ]


def _apply_limits(phase: Phase) -> Phase:
    """Return a placed phase whose mixture respects its limits."""
    mixture, placement = phase.batches.mixture, phase.placement
    assert mixture is not None, phase.batches.url
    most = [
        None if limit is None else max(0, limit - first)
        for limit, first in zip(phase.limits, placement.firsts, strict=True)
    ]
    samples = phase.size.samples(phase.steps)
    limited_mixture = apply_limits(mixture, most, since=placement.first_position, samples=samples)
    return replace(phase, batches=phase.batches.mixed(limited_mixture))


def placements(
    sizes: Sequence[PhaseSize],
    data: Sequence[Sequence[Key]],
    origin: Origin[Key] | None = None,
) -> Iterator[Placement]:
    """Yield the placements of consecutive phases.

    Args:
        sizes: size of each phase.
        data: data sets of each phase, in the order of its sources.
        origin: point from which the run continues another one. The positions of phases that end
            before it are unknown, and given as of the origin.
    """
    first, sample = 0, 0
    for size, keys in zip(sizes, data, strict=True):
        before = 0
        if origin and first <= origin.step < first + size.steps:
            # The origin is inside this phase. The other run may have had other batch sizes before,
            # so only its own count of samples is right.
            before, sample = origin.step - first, origin.samples
        taken = compute_positions_after(
            max(first, origin.step if origin else 0), sizes, data, origin
        )
        positions = [taken.get(key, 0) for key in keys]
        if size.mixture is None:
            yield Placement(first_step=first, first_sample=sample, first_position=positions[0])
        else:
            counts = size.counts(before)
            yield Placement(
                first_step=first,
                first_sample=sample,
                first_position=size.samples(before),
                firsts=tuple(
                    position - count for position, count in zip(positions, counts, strict=True)
                ),
            )
        sample += size.samples(size.steps) - size.samples(before)
        first += size.steps


def compute_positions_after(
    step: int,
    sizes: Sequence[PhaseSize],
    data: Sequence[Sequence[Key]],
    origin: Origin[Key] | None = None,
) -> dict[Key, int]:
    """Return the number of samples that a run has taken of each data set after `step` steps.

    Args:
        step: number of completed steps, not before the origin.
        sizes: sizes of the phases.
        data: data sets of each phase, in the order of its sources.
        origin: point from which the run continues another one.
    """
    taken, since, first = dict(origin.positions if origin else {}), origin.step if origin else 0, 0
    for size, keys in zip(sizes, data, strict=True):
        begin, end = max(since - first, 0), min(step - first, size.steps)
        if begin < end:
            for key, old, new in zip(keys, size.counts(begin), size.counts(end), strict=True):
                taken[key] = taken.get(key, 0) + new - old
        first += size.steps
    return taken
