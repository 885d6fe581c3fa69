"""Batch-size warm-up: how many samples a step takes, a pure function of the step."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


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
