"""Batch-size warm-up: how many samples a step takes, a pure function of the step."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveInt


class BatchSizeWarmup(BaseModel):
    """Smaller batches at first, growing evenly, step by step, to the recipe's `batch_size`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    start: PositiveInt
    """Samples in the first step."""
    steps: PositiveInt
    """The first step of full size comes after so many."""
    multiple: PositiveInt = 1
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
    num_sizes = -(-(full - warmup.start) // warmup.multiple)
    return warmup.start + step * num_sizes // warmup.steps * warmup.multiple


def steps_of_equal_size(step: int, most: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """How many steps from `step` on, up to `most`, have its size; at least 1."""
    if warmup is None or step >= warmup.steps:
        return most
    size, count = batch_size_at(step, full=full, warmup=warmup), 1
    while count < most and batch_size_at(step + count, full=full, warmup=warmup) == size:
        count += 1
    return count


def samples_in(steps: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """Samples in so many steps from the first one on."""
    warming = min(steps, warmup.steps) if warmup else 0
    grown = sum(batch_size_at(step, full=full, warmup=warmup) for step in range(warming))
    return grown + (steps - warming) * full


def steps_for(samples: int, *, full: int, warmup: BatchSizeWarmup | None) -> int:
    """The fewest steps that have so many samples; at least 1, and one more than the warm-up has."""
    warming = warmup.steps if warmup else 0
    grown = samples_in(warming, full=full, warmup=warmup)
    return warming + max(1, -(-(samples - grown) // full))
