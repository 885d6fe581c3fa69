"""Rules between the sizes of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Number of blocks."""
Width = Annotated[int, Field(gt=0, le=2**24)]
"""Numbers for each token."""
Heads = Annotated[int, Field(gt=0, le=2**16)]
"""Heads of a block."""
Small = Annotated[float, Field(gt=0, le=1e3)]
"""A small number, such as one added to variances, or the deviation of first weights."""
_MOST_WEIGHTS = 10**15


def check_divides(name: str, value: int, of: str, total: int) -> None:
    """Refuses a size that does not divide another one.

    Raises:
        ValueError: names both and the nearest that does.
    """
    if total % value:
        closest = min(_divisors(total), key=lambda n: abs(n - value))
        raise ValueError(
            f"{name} ({value}) must divide {of} ({total}); the nearest that does is {closest}"
        )


def check_head_is_even(hidden_size: int, num_heads: int) -> None:
    """Refuses heads whose features cannot be turned in pairs.

    Raises:
        ValueError: names the sizes.
    """
    if (hidden_size // num_heads) % 2:
        raise ValueError(
            f"hidden_size / num_heads ({hidden_size // num_heads}) must be even with rotary "
            "positions, which turn features in pairs"
        )


def check_weights(num_layers: int, hidden_size: int, intermediate_size: int | None) -> None:
    """Refuses a model that no cluster there is could hold.

    Raises:
        ValueError: its blocks have more than 10^15 weights.
    """
    inner = intermediate_size or 4 * hidden_size
    weights = num_layers * hidden_size * (4 * hidden_size + 2 * inner)
    if weights > _MOST_WEIGHTS:
        raise ValueError(
            f"num_layers ({num_layers}), hidden_size ({hidden_size}) and intermediate_size "
            f"({inner}) make {weights:.1e} weights: expected at most {_MOST_WEIGHTS:.0e}"
        )


def tensor_problems(tensor: int, sizes: Mapping[str, int]) -> list[str]:
    """A line if some of a model's sizes, by recipe key, are no multiples of `parallel.tensor`."""
    if all(size % tensor == 0 for size in sizes.values()):
        return []
    common = math.gcd(*sizes.values())
    closest = min(_divisors(common), key=lambda n: abs(n - tensor))
    named = ", ".join(f"workload.{name} ({size})" for name, size in sizes.items())
    return [
        f"parallel.tensor: {tensor}: expected a divisor of {named}; the nearest that is one is "
        f"{closest}"
    ]


def stage_problems(num_stages: int, num_layers: int) -> list[str]:
    """A line if a model has fewer blocks than a pipeline has stages."""
    if num_stages <= num_layers:
        return []
    return [
        f"parallel.pipeline: {num_stages} stages in all: expected at most workload.num_layers "
        f"({num_layers}), a block for each"
    ]


def _divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
