"""A phase: consecutive steps of a run on one data set, of one batch size but for its warm-up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastrata_pipelines.batch_size_warmup import BatchSizeWarmup, samples_in
from elastrata_pipelines.batches import Batches, Group, Start


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A value: it can be sent to any process."""

    batches: Batches
    steps: int
    batch_size: int
    warmup: BatchSizeWarmup | None = None
    first_step: int = 0
    """Steps of the run before it."""
    first_sample: int = 0
    """Samples of the run before it."""
    first_position: int = 0
    """Samples of its data set that earlier phases took: it goes on behind them."""

    @property
    def last_step(self) -> int:
        """Steps of the run when it ends."""
        return self.first_step + self.steps

    def groups(self, start: Start, *, max_tokens: int) -> list[Group]:
        """Its groups that are left at `start`, which may lie before it, in it or behind it."""
        done = max(0, start.step - self.first_step)
        seen = start.samples - self.first_sample if done else 0
        groups = self.batches.groups(
            Start(step=done, samples=self.first_position + seen),
            steps=self.steps,
            batch_size=self.batch_size,
            max_tokens=max_tokens,
            warmup=self.warmup,
        )
        return [replace(group, first_step=group.first_step + self.first_step) for group in groups]


def one_after_another(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """The phases with the steps, samples and positions that they begin at."""
    step, sample, positions = 0, 0, dict[str, int]()
    placed = []
    for phase in phases:
        url = phase.batches.url
        position = positions.get(url, 0)
        placed.append(replace(phase, first_step=step, first_sample=sample, first_position=position))
        samples = samples_in(phase.steps, full=phase.batch_size, warmup=phase.warmup)
        step, sample, positions[url] = step + phase.steps, sample + samples, position + samples
    return tuple(placed)
