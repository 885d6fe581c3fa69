"""The best time between checkpoints, by the formulas of Young and of Daly."""

from __future__ import annotations

import math


def young_seconds(checkpoint_seconds: float, seconds_between_faults: float) -> float:
    """sqrt(2 d M) (Young 1974, A first order approximation to the optimum checkpoint interval).

    Args:
        checkpoint_seconds: d, that a checkpoint keeps the run from computing.
        seconds_between_faults: M, mean, of the whole run.
    """
    return math.sqrt(2 * checkpoint_seconds * seconds_between_faults)


def daly_seconds(checkpoint_seconds: float, seconds_between_faults: float) -> float:
    """The higher-order estimate of Daly (2006, equation 37), M where d is 2 M and more.

    Args:
        checkpoint_seconds: d.
        seconds_between_faults: M.
    """
    d, between = checkpoint_seconds, seconds_between_faults
    if d >= 2 * between:
        return between
    ratio = d / (2 * between)
    return math.sqrt(2 * d * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d
