"""The importance of a key: how much of the differences between trials it explains by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_MOST_GROUPS = 4
_SMALLEST_GROUP = 2


def importance(values: Sequence[Any], results: Sequence[float]) -> float:
    """Share of the variance of the results' ranks that lies between groups of trials with similar
    values, less what chance alone would put there: Kelley's epsilon squared (1935).

    Ranks, so that one diverged trial does not decide; groups, so that the best value may lie in the
    middle. It sees every key by itself, no pairs of them.

    Args:
        values: of the key, per trial that has one.
        results: of the same trials; NaN counts as the worst.

    Returns:
        0 to 1; 0 also where there are too few trials to tell.
    """
    groups = _groups(values)
    ranks = _ranks(np.array([math.inf if math.isnan(r) else r for r in results]))
    names = np.unique(groups)
    if len(names) < 2 or len(ranks) <= len(names):
        return 0.0
    total = float(((ranks - ranks.mean()) ** 2).sum())
    within = sum(
        float(((ranks[groups == name] - ranks[groups == name].mean()) ** 2).sum()) for name in names
    )
    if total == 0.0:
        return 0.0
    expected_within = within / (len(ranks) - len(names))
    return max(0.0, 1 - expected_within / (total / (len(ranks) - 1)))


def _groups(values: Sequence[Any]) -> Any:
    """A group's number for every value: its own where there are few, else that of its quantile."""
    distinct = sorted(set(map(str, values)))
    numeric = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    if not numeric or len(distinct) <= _MOST_GROUPS:
        return np.array([distinct.index(str(value)) for value in values])
    count = max(2, min(_MOST_GROUPS, len(values) // _SMALLEST_GROUP))
    return (_ranks(np.array(values, dtype=float)) * count / len(values)).astype(int)


def _ranks(numbers: Any) -> Any:
    """Ranks from 0; equal numbers share the mean of theirs."""
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]
