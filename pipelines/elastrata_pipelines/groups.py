"""Batch sizes by step, and groups: consecutive steps that are read and dealt together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, overload

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override


class BatchSizeWarmup(BaseModel):
    """Batch sizes that grow linearly in the first steps, up to the recipe's `batch_size`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    start: Annotated[int, Field(gt=0, le=2**24)]
    """Samples in the first step."""
    steps: Annotated[int, Field(gt=0, le=10**9)]
    """Number of steps before the first one of full size."""
    multiple: Annotated[int, Field(gt=0, le=2**24)] = 1
    """Sizes are `start` plus multiples of this many samples."""


def batch_size_at(step: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """Return the number of samples in step `step`, counted from 0.

    The sizes `start`, `start + multiple`, ... below `full` each last for the same number of steps,
    give or take one.

    Args:
        step: the step.
        full: samples in a step after the warm-up.
        warmup: the warm-up; None if all steps are of full size.
    """
    if warmup is None or step >= warmup.steps:
        return full
    num_sizes = _num_sizes(full, warmup)
    return warmup.start + step * num_sizes // warmup.steps * warmup.multiple


def steps_of_equal_size(step: int, most: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """Return how many steps from `step` on have the same size, at least 1 and at most `most`."""
    if warmup is None or step >= warmup.steps:
        return most
    # `start` may already be the full size.
    num_sizes = max(1, _num_sizes(full, warmup))
    larger = step * num_sizes // warmup.steps + 1
    first_larger = -(-larger * warmup.steps // num_sizes)
    return max(1, min(most, first_larger - step))


def count_samples(steps: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """Return the number of samples in the first `steps` steps."""
    warming = min(steps, warmup.steps) if warmup else 0
    if warmup is None:
        return steps * full
    sizes = _sum_of_floors(warming, _num_sizes(full, warmup), warmup.steps)
    return warming * warmup.start + sizes * warmup.multiple + (steps - warming) * full


def count_steps_for(samples: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """Return the smallest number of steps with `samples` samples.

    The result is at least 1, and more than the number of warm-up steps.
    """
    warming = warmup.steps if warmup else 0
    grown = count_samples(warming, full=full, warmup=warmup)
    return warming + max(1, -(-(samples - grown) // full))


def _num_sizes(full: int, warmup: BatchSizeWarmup) -> int:
    return -(-(full - warmup.start) // warmup.multiple)


def _sum_of_floors(count: int, slope: int, divisor: int) -> int:
    """Return the sum of `k * slope // divisor` over k from 0 to `count` - 1."""
    total, offset = 0, 0
    # As many iterations as Euclid's algorithm takes: a warm-up may have a billion steps.
    while count > 0:
        total += (count - 1) * count // 2 * (slope // divisor) + count * (offset // divisor)
        slope, offset = slope % divisor, offset % divisor
        top = slope * count + offset
        if top < divisor:
            break
        count, offset = divmod(top, divisor)
        slope, divisor = divisor, slope
    return total


@dataclass(frozen=True, kw_only=True)
class Group:
    """Consecutive steps with one batch size."""

    first_step: int
    """Number of steps before this group."""
    first_position: int
    num_steps: int
    batch_size: int


class Groups(Sequence[Group]):
    """The remaining groups of a phase: a single step first, then groups that double in size.

    Args:
        done: number of completed steps of the phase.
        position: position of the next sample.
        steps: number of steps of the phase.
        batch_size: samples per step after the warm-up.
        most: maximum number of steps in a group.
        warmup: warm-up of the batch size.
        before: number of steps of the run before the phase.
    """

    def __init__(
        self,
        *,
        done: int,
        position: int,
        steps: int,
        batch_size: int,
        most: int,
        warmup: BatchSizeWarmup | None = None,
        before: int = 0,
    ) -> None:
        self._batch_size, self._most, self._before = batch_size, most, before
        self._first: list[Group] = []
        # A small first group delivers the first batch soon; large groups read more efficiently.
        size = 1
        while done < steps and (size < most or (warmup and done < warmup.steps)):
            group = Group(
                first_step=before + done,
                first_position=position,
                num_steps=steps_of_equal_size(
                    done, min(size, steps - done), full=batch_size, warmup=warmup
                ),
                batch_size=batch_size_at(done, full=batch_size, warmup=warmup),
            )
            self._first.append(group)
            done, position = done + group.num_steps, position + group.num_steps * group.batch_size
            size = min(2 * size, most)
        # The remaining groups are alike, and are computed on access: a run may have millions.
        self._done, self._position, self._left = done, position, max(0, steps - done)

    @override
    def __len__(self) -> int:
        return len(self._first) + -(-self._left // self._most)

    @overload
    def __getitem__(self, number: int) -> Group: ...

    @overload
    def __getitem__(self, number: slice) -> list[Group]: ...

    @override
    def __getitem__(self, number: int | slice) -> Group | list[Group]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        if number < len(self._first):
            return self._first[number]
        behind = (number - len(self._first)) * self._most
        return Group(
            first_step=self._before + self._done + behind,
            first_position=self._position + behind * self._batch_size,
            num_steps=min(self._most, self._left - behind),
            batch_size=self._batch_size,
        )
