"""Rules between the sizes of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping


def check_divides(name: str, value: int, of: str, total: int) -> None:
    """Refuses a size that does not divide another one.

    Raises:
        ValueError: names both and the nearest that does.
    """
    if total % value:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        closest = min(fitting, key=lambda n: abs(n - value))
        raise ValueError(
            f"{name} ({value}) must divide {of} ({total}); the nearest that does is {closest}"
        )


def tensor_problems(tensor: int, sizes: Mapping[str, int]) -> list[str]:
    """A line if some of a model's sizes, by recipe key, are no multiples of `parallel.tensor`."""
    if all(size % tensor == 0 for size in sizes.values()):
        return []
    common = math.gcd(*sizes.values())
    fitting = [n for n in range(1, common + 1) if common % n == 0]
    closest = min(fitting, key=lambda n: abs(n - tensor))
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
