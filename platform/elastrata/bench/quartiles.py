"""Quartiles: what is said of a figure that was measured many times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The middle of some measurements, and the bounds of their middle half."""

    lower: float
    median: float
    upper: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of at least one value; between two of them where none lies at the place."""
    if len(values) == 1:
        return Quartiles(lower=values[0], median=values[0], upper=values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(lower=lower, median=median, upper=upper)
