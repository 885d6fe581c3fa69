"""The demand of a run: how many workers it asks the cluster's autoscaler for.

Ray's autoscaler launches nothing at all for a request beyond what its cluster may ever have, nor
for the requests of several runs that are so together. So a run that is refused asks for fewer, and
finds what it can have by halving; one that cannot have the least that it needs asks for nothing for
a while.
"""

from __future__ import annotations

SECONDS_TO_JUDGE = 12.0
"""From a new request to an answer that is about it: the autoscaler looks every five seconds."""


class Demand:
    """What one run asks for. It is told what came of it, and never asks for less than it has.

    Args:
        least: the fewest workers that are of use.
        patience: seconds after which a refusal is of old: another run may have ended, or the
            cluster's bounds changed. Different for each run, so that they do not ask in step.
    """

    def __init__(self, *, least: int, patience: float) -> None:
        self._least = least
        self._patience = patience
        self._asked = 0
        self._since = float("-inf")
        self._refused: int | None = None
        self._refused_at = float("-inf")

    def workers(self, most: int, *, have: int, is_refused: bool, now: float) -> int:
        """How many workers to ask for now.

        Args:
            most: that are of use.
            have: workers that there is room for now, or that run.
            is_refused: whether the autoscaler refuses what is asked of it.
            now: by a monotonic clock, in seconds.
        """
        if is_refused and self._asked > have and now - self._since >= SECONDS_TO_JUDGE:
            self._refused, self._refused_at = self._asked, now
        elif now - self._refused_at >= self._patience:
            self._refused = None
        asked = self._between(most, have)
        if asked != self._asked:
            self._asked, self._since = asked, now
        return asked

    def _between(self, most: int, have: int) -> int:
        """Half-way from what there is to what was refused."""
        if have >= most:
            return most
        if self._refused is None:
            return most
        if self._refused <= self._least:
            return have
        return min(most, max(self._least, have, (have + self._refused) // 2))
