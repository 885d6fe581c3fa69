"""The batch size of every step, and groups: consecutive steps that are read and dealt together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, overload

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override


class BatchSizeWarmup(BaseModel):
    """Smaller batches at first, growing evenly, step by step, to the recipe's `batch_size`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    start: Annotated[int, Field(gt=0, le=2**24)]
    """Samples in the first step."""
    steps: Annotated[int, Field(gt=0, le=10**9)]
    """The first step of full size comes after so many."""
    multiple: Annotated[int, Field(gt=0, le=2**24)] = 1
    """Sizes grow by whole multiples of this."""


def batch_size_at(step: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """Samples in step `step`, counted from 0.

    The sizes `start`, `start + multiple`, ... below `full` get equally many steps each, up to one.

    Args:
        step: the step.
        full: samples in a step after the warm-up.
        warmup: None: all steps are of full size.
    """
    if warmup is None or step >= warmup.steps:
        return full
    num_sizes = _num_sizes(full, warmup)
    return warmup.start + step * num_sizes // warmup.steps * warmup.multiple


def steps_of_equal_size(step: int, most: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """How many steps from `step` on, up to `most`, have its size; at least 1."""
    if warmup is None or step >= warmup.steps:
        return most
    num_sizes = max(1, _num_sizes(full, warmup))
    larger = step * num_sizes // warmup.steps + 1
    first_larger = -(-larger * warmup.steps // num_sizes)
    return max(1, min(most, first_larger - step))


def samples_in(steps: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """Samples in so many steps from the first one on."""
    warming = min(steps, warmup.steps) if warmup else 0
    if warmup is None:
        return steps * full
    sizes = _sum_of_floors(warming, _num_sizes(full, warmup), warmup.steps)
    return warming * warmup.start + sizes * warmup.multiple + (steps - warming) * full


def steps_for(samples: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """The fewest steps that have so many samples; at least 1, and one more than the warm-up has."""
    warming = warmup.steps if warmup else 0
    grown = samples_in(warming, full=full, warmup=warmup)
    return warming + max(1, -(-(samples - grown) // full))


def _num_sizes(full: int, warmup: BatchSizeWarmup) -> int:
    return -(-(full - warmup.start) // warmup.multiple)


def _sum_of_floors(count: int, slope: int, divisor: int) -> int:
    """The sum of `k * slope // divisor` over k from 0 to `count` - 1, in as many rounds as Euclid's
    algorithm takes: a warm-up may have a billion steps."""
    total, offset = 0, 0
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
    """Consecutive steps of one batch size."""

    first_step: int
    """Steps done before this group."""
    first_position: int
    num_steps: int
    batch_size: int


class Groups(Sequence[Group]):
    """The groups of a phase that are left: a single step first, then doubling in size, so that the
    first batch comes soon and the rest in bulk.

    Those that are alike are made where somebody asks for them: a run may have millions.

    Args:
        done: steps of the phase that are done.
        position: of the next sample.
        steps: of the phase.
        batch_size: samples of a step after the warm-up.
        most: steps of a group, at most.
        warmup: of the batch size.
        before: steps of the run before the phase.
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
