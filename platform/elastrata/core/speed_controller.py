"""The controller of speeds: when the ranks are dealt to by other speeds, and by which ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastrata.core.paces import Estimate, Floats, certain
from elastrata_pipelines.speeds import Speeds, quantized

LEAST_GAIN = 0.04
"""Of a step's time: for less the speeds stay."""
PATIENCE = 48
"""Steps until speeds that were asked for and did not come are asked for again."""
_SETTLING = 8
"""Steps that speeds stay, once steps are dealt by them."""
_LEAST_STEPS = 6


class SpeedController:
    """Asks for other speeds where the steps would be shorter by more than noise explains: small
    gains must be seen for longer than large ones, and none is taken back without the same proof.

    Args:
        num_ranks: number of data ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._asked: Speeds = ()
        self._asked_at = self._in_effect_since = 0

    def decide(self, step: int, dealt_by: Sequence[int], estimate: Estimate) -> Speeds | None:
        """The speeds that steps to come should be dealt by; None: those that there are.

        Args:
            step: the last one that is done.
            dealt_by: the speeds it was dealt by; none: all are equally fast.
            estimate: of the data ranks' paces.
        """
        if self._is_waiting(step, tuple(dealt_by)):
            return None
        known = np.isfinite(estimate.paces)
        if not known.any() or estimate.num_steps[known].min() < _LEAST_STEPS:
            return None
        speeds = np.asarray(dealt_by or (1,) * self._num_ranks, dtype=np.float64)
        paces = _completed(estimate.paces, speeds)
        gain, doubt = _gain(speeds, paces, estimate)
        if gain <= max(LEAST_GAIN, doubt):
            return None
        wanted = quantized(paces.tolist())
        if wanted == tuple(dealt_by):
            return None
        self._asked, self._asked_at = wanted, step
        return wanted

    def _is_waiting(self, step: int, dealt_by: Speeds) -> bool:
        """Whether asked-for speeds are on their way, or have only come."""
        if not self._asked:
            return False
        if dealt_by != self._asked:
            self._in_effect_since = step + 1
            return step - self._asked_at < PATIENCE
        return step - self._in_effect_since < _SETTLING


def _completed(paces: Floats, speeds: Floats) -> Floats:
    """Paces with those of ranks that had no rows, which keep their speeds."""
    known = np.isfinite(paces)
    scale = np.median(paces[known] / speeds[known])
    return np.where(known, paces, speeds * scale)


def _gain(speeds: Floats, paces: Floats, estimate: Estimate) -> tuple[float, float]:
    """What the slowest rank takes longer than if all were dealt to by these paces; and the least
    that is no chance."""
    times = speeds / paces
    slowest = int(np.argmax(times))
    ideal = speeds.sum() / paces.sum()
    shares = paces / paces.sum()
    shares[slowest] = 1 - shares[slowest]
    errors = np.nan_to_num(estimate.errors)
    error = float(np.sqrt(np.sum((shares * errors) ** 2)))
    steps = float(estimate.num_steps[np.isfinite(estimate.paces)].min())
    return float(times[slowest] / ideal) - 1, float(certain(len(speeds), steps)) * error
