"""Slow nodes: those that a run's next groups of workers do without, as its recipe asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from elastrata.cluster.event_sender import tell
from elastrata.core.events import Warned

_SECONDS_TO_ANSWER = 5.0


class SlowNodes:
    """Asks the control channel for them, and says who is left out.

    Args:
        channel: its handle.
        limit: nodes with a worker below this share of its kind's pace are slow.
    """

    def __init__(self, channel: Any, limit: float) -> None:
        self._channel, self._limit = channel, limit
        self._known: frozenset[str] = frozenset()

    def nodes(self) -> frozenset[str]:
        """Their ids; those known last, where the channel does not answer."""
        try:
            call = self._channel.slow_nodes.remote()
            found: Mapping[str, float] = ray.get(call, timeout=_SECONDS_TO_ANSWER)
        except ray.exceptions.RayError:
            return self._known
        slow = {node: factor for node, factor in found.items() if factor < self._limit}
        for node in slow.keys() - self._known:
            text = (
                f"node {node} has a worker at {slow[node]:.2f} of its kind's speed, below "
                f"workers.exclude_slower_than ({self._limit:g}): left out from the next resize on, "
                "where enough workers have room elsewhere"
            )
            tell(self._channel, Warned(text=text))
        self._known = frozenset(slow)
        return self._known
