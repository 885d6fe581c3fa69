"""Rules between the sizes of a model."""

from __future__ import annotations


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
